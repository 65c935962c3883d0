"""Tables of an evaluated classifier: figures of each class, and which class is taken for which. Imports no torch."""

from collections.abc import Mapping
from typing import Any

MOST_COUNTED = 100
"""Classes of a run up to which `run.json` keeps which is taken for which."""
_MOST_COLUMNS = 20
_MOST_PAIRS = 20


def classes_table(counts: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Returns a head and a row for each class.

    Args:
        counts: Figures by class; see `metrics.count_classes`.
    """
    shares = ("precision", "recall", "f1")
    rows = [
        [name, *("–" if figures.get(key) is None else f"{figures[key]:.4f}" for key in shares), f"{figures['rows']:,}"]
        for name, figures in counts.items()
    ]
    return [["class", "precision", "recall", "F1", "rows"], *rows]


def confusion_table(confusions: Mapping[str, Mapping[str, int]], names: list[str]) -> list[list[str]]:
    """Returns a head and rows: a confusion matrix, or of many classes the pairs that are confused most.

    Args:
        confusions: Rows by true and predicted class; see `metrics.count_confusions`.
    """
    if len(names) <= _MOST_COLUMNS:
        rows = [[name, *(f"{confusions.get(name, {}).get(other, 0):,}" for other in names)] for name in names]
        return [["true class, taken for", *names], *rows]
    pairs = [(n, true, other) for true, row in confusions.items() for other, n in row.items() if true != other]
    pairs.sort(key=lambda pair: -pair[0])
    return [["true class", "taken for", "rows"], *([true, other, f"{n:,}"] for n, true, other in pairs[:_MOST_PAIRS])]

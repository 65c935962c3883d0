"""What tests take: `tests/durations.json`, which `make durations` writes, and by which a session is ordered.

Seconds of a worker, alone on two cores: of groups of tests that share launched runs, in the order in which they run,
and of tests that belong to none (`FOLDER/FILE::NAME`), with all their cases.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "durations.json"
# What is shorter is not written down.
LEAST_S = 1.0


def group_of(item: pytest.Item) -> str:
    """What runs on one worker: a group of tests, or all cases of a test."""
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker is not None else _test(item.nodeid)


def longest_first(items: list[pytest.Item]) -> None:
    """Sorts tests by what their group takes; those of a group stay together, in the order in which they are written."""
    seconds = json.loads(FILE.read_text()) if FILE.exists() else {}
    # Tests of several machines mostly wait: first, while the ops that DeepSpeed's runs need are compiled.
    items.sort(
        key=lambda item: (
            item.get_closest_marker("machines") is None,
            -seconds.get(group_of(item), 0.0),
            group_of(item),
        )
    )


def write(reports: dict[str, list[pytest.TestReport]]) -> None:
    """Writes the table from a session's reports, by the outcome that they are filed under."""
    seconds: Counter[str] = Counter()
    for report in (report for some in reports.values() for report in some if hasattr(report, "duration")):
        # As xdist marks the tests of a group.
        name, _, group = report.nodeid.rpartition("@")
        seconds[group if name and "]" not in group else _test(report.nodeid)] += report.duration
    table = {name: round(taken, 1) for name, taken in seconds.most_common() if taken >= LEAST_S}
    FILE.write_text(json.dumps(table, indent=1) + "\n")


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0].removeprefix("tests/")

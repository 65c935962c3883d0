"""`harness.json`, in which `finetune eval --harness` keeps its figures beside a run or a model."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from finetune.utils import atomic_files, json_files
from finetune.utils.errors import CheckpointError, RecipeError

NAME = "harness.json"

# Figures that agree in these are of one evaluation: a later one replaces an earlier one.
_SAME = ("task", "step", "chat", "num_fewshot", "limit")

_KEYS = {*_SAME, "metric", "filter", "value", "stderr", "samples"}


def check_harness_is_installed() -> None:
    """Raises RecipeError if lm-evaluation-harness is not installed."""
    if find_spec("lm_eval") is None:
        raise RecipeError(
            "--harness needs lm-evaluation-harness (lm_eval), which is not installed. Install the extra: "
            "pip install 'finetune[harness]'. `finetune eval --data FILE` works without it."
        )


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns the figures kept in a folder, one a task, metric and filter; none if there is no file.

    Raises:
        CheckpointError: If the file is not what `finetune eval --harness` writes.
    """
    file = folder / NAME
    try:
        rows: list[dict[str, Any]] = json_files.parse(file.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}. Restore it from a copy, or remove it.") from error
    if json_files.shape_mismatch(rows, [dict]) is not None or not all(set(row) >= _KEYS for row in rows):
        raise CheckpointError(f"{file} is not what `finetune eval --harness` writes. Move it out of the way.")
    return rows


def add_results(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes figures behind those that are there, and instead of those of the same evaluation.

    Returns:
        The file.

    Raises:
        CheckpointError: If it cannot be read or written.
    """
    file, new = folder / NAME, {_evaluation(row) for row in rows}
    kept = [row for row in read_results(folder) if _evaluation(row) not in new]
    try:
        atomic_files.write_json(file, [*kept, *rows])
    except OSError as error:
        raise CheckpointError(
            f"{file} cannot be written: {error.strerror or error}. Let it be written there."
        ) from error
    return file


def metric_of(row: dict[str, Any]) -> str:
    """Returns a figure's metric, with the filter that answers went through if there is one."""
    return str(row["metric"]) if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"


def _evaluation(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[key] for key in _SAME)

"""`run.json`, and what else every reader of a run directory has to know of its files. No torch here."""

from pathlib import Path
from typing import Any

from finetune.config import path_kinds
from finetune.utils import json_files
from finetune.utils.atomic_files import Lines, read_whole_lines
from finetune.utils.errors import CheckpointError, RecipeError

RUN = "run.json"
METRICS, INCIDENTS = "metrics.jsonl", "incidents.jsonl"

_NUMBER, _TEXT, _OBJECT = (float, type(None)), (str, type(None)), (dict, type(None))
# What is read of `run.json`. Earlier versions wrote less, so only the starts must be there.
_SHAPE: json_files.Shape = {
    "starts": [
        {
            "time": str,
            "host": str,
            "pid": int,
            "processes": int,
            "data_ranks": int,
            "from_step": int,
            "to_step": (int, type(None)),
            "last_logged": _NUMBER,
            "ended": _TEXT,
            "resumed_from": _TEXT,
        }
    ],
    "first_checkpoint": int,
    "finished": str,
    "stopped": str,
    "results": {"ended_early": {"step": int, "best": {"by": _TEXT, "value": _NUMBER, "evaluations": int}}},
    "length": {"num_steps": int},
    "identity": dict,
    "precision": str,
    "data": dict,
    "launch": dict,
    "runs": dict,
    "versions": dict,
    "command": list,
    "base": _OBJECT,
    "memory": _OBJECT,
    "peak_memory": _OBJECT,
    "kernels": _OBJECT,
    "gradients": _OBJECT,
}
# Of a step, in numbers; what is not finite is null.
_STEP: json_files.Shape = dict.fromkeys(
    ("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "time", "validation_loss"), _NUMBER
)
_INCIDENT: json_files.Shape = {"step": int, "kind": str, "in_a_row": int, "micro_batches": [{"rows": [int]}]}


def read_facts(directory: Path) -> dict[str, Any]:
    """The `run.json` of a run.

    Raises:
        RecipeError: If there is no run.
        CheckpointError: If it cannot be read.
    """
    file = directory / RUN
    try:
        facts: dict[str, Any] = json_files.read(file, _SHAPE, needed=["starts"])
    except (FileNotFoundError, NotADirectoryError) as error:
        if (wrong := path_kinds.not_a_run(directory)) is not None:
            raise RecipeError(wrong) from error
        raise RecipeError(
            f"{directory} holds no run: it has no run.json. Give a run directory, such as runs/sample; `finetune runs` "
            "lists those that are here."
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or error}. Restore it from a copy."
        ) from error
    return facts


def read_metrics(directory: Path) -> Lines:
    """The lines of a run's metrics, as the file has them.

    Raises:
        OSError: If there is no such file.
    """
    return read_whole_lines(directory / METRICS, _is_metric)


def read_incidents(directory: Path) -> Lines:
    """The steps that a run has skipped.

    Raises:
        OSError: If there is no such file.
    """
    needed = ("step", "kind", "in_a_row", "micro_batches")
    return read_whole_lines(
        directory / INCIDENTS, lambda line: json_files.misfit(line, _INCIDENT, needed) is None and line["step"] > 0
    )


def _is_metric(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int and line["step"] >= 0 and json_files.misfit(line, _STEP) is None

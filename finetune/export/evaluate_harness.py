"""Evaluates an opened network on tasks of lm-evaluation-harness (`lm_eval`, the extra [harness]).

Its figures are kept in `harness.json`, beside a run or a model. Reading that takes neither torch nor lm_eval.
"""

import importlib.metadata
import logging
import math
import time
import traceback
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from finetune.config.recipe import hint
from finetune.utils import atomic_files, json_files
from finetune.utils.bounded_work import bounded_work
from finetune.utils.console import plain_table
from finetune.utils.errors import CheckpointError, DataError, FinetuneError, RecipeError

if TYPE_CHECKING:
    from finetune.export.load_model import LoadedModel

_PACKAGE = Path(__file__).parents[1]
_NUMBERS = ("value", "± error", "questions", "examples")

NAME = "harness.json"

# Figures that agree in these are of one evaluation: a later one replaces an earlier one.
_SAME = ("task", "step", "chat", "num_fewshot", "limit")

_evaluation_of = itemgetter(*_SAME)
_KEYS = {*_SAME, "metric", "filter", "value", "stderr", "samples"}


def evaluate_harness(
    opened: "LoadedModel",
    tasks: Sequence[str],
    *,
    chat: bool = False,
    num_fewshot: int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
) -> list[dict[str, Any]]:
    """Returns lm_eval's figures, by its own seeds: a row for each task or group, metric and filter.

    Args:
        tasks: Names that lm_eval knows, `*` for any letters, or paths (with a slash, or ending in `.yaml`) of task
            files and of folders, of which all tasks are taken.
        chat: Puts prompts into the tokenizer's chat template, examples as earlier turns.
        num_fewshot: Examples in front of each question; the task's own number if None.
        limit: Questions of each task; all if None.
        batch_size: Texts in a forward pass; 8 if None.

    Raises:
        RecipeError: If there is no such task.
        DataError: If a task cannot be loaded, or does not fit the network.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from finetune.models import prompts
    from finetune.models.lora_adapters import transformer

    network: Any = transformer(opened.network)
    if chat and not opened.tokenizer.chat_template:
        raise DataError("--chat needs a tokenizer with a chat template, and this one has none. Leave --chat out.")
    network.generation_config.eos_token_id = (
        prompts.stop_tokens(network.generation_config, opened.tokenizer, opened.ends) or None
    )
    log = logging.getLogger("lm_eval.models.huggingface")
    before = log.level
    log.setLevel(logging.ERROR)  # it warns of networks that are opened already
    # A template writes the token that begins texts itself, or does without.
    wrapped = HFLM(
        pretrained=network,
        tokenizer=opened.tokenizer,
        batch_size=batch_size or 8,
        add_bos_token=False if chat else None,
        chat_template_args=dict(opened.template_args),
    )
    log.setLevel(before)
    wrapped.apply_chat_template = bounded_work(*prompts.BOUND)(wrapped.apply_chat_template)
    try:
        manager, names = _find_tasks(tasks)
        results = simple_evaluate(
            wrapped,
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            apply_chat_template=chat,
            log_samples=False,
        )
    except FinetuneError:
        raise
    except Exception as error:  # data, templates and Python code of a task are its own, and may raise anything
        *_, frame = traceback.extract_tb(error.__traceback__)
        if _PACKAGE in Path(frame.filename).parents:
            raise  # a fault of this package, which no task is to blame for
        words = " ".join(str(error).split())[:400]
        raise DataError(
            f"--harness: lm_eval cannot evaluate {', '.join(tasks)}: {type(error).__name__}{': ' if words else ''}"
            f"{words.removesuffix('.')}. Correct the task (its file may lack a key, such as doc_to_target), or name "
            "another; data on the hub need the network, or its cache."
        ) from error
    about = {"step": opened.step, "chat": chat, "limit": limit}
    return _rows(results, about | {"time": time.time(), "lm_eval": importlib.metadata.version("lm_eval")})


def _find_tasks(tasks: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns lm_eval's index of tasks, and the names or files to take from it."""
    from lm_eval.tasks import TaskManager

    paths = {word: Path(word) for word in tasks if "/" in word or word.endswith(".yaml")}
    for word, path in paths.items():
        if not path.exists():
            raise RecipeError(f"--harness: there is no task file or folder {word}. Correct the path.")
    folders = [str(path if path.is_dir() else path.parent) for path in paths.values()]
    # Without its own 14,000 tasks, of which reading the files takes most of a minute.
    manager = TaskManager(include_path=folders, include_defaults=len(paths) < len(tasks))
    names: dict[str, None] = {}
    for word in tasks:
        if word not in paths:
            matches = manager.match_tasks([word])
            problem = (
                f"lm_eval knows no task '{word}'{hint(word, manager.all_tasks)}. Its list is printed by "
                "`lm_eval ls tasks`; a file of your own is named by its path, such as ./task.yaml."
            )
        elif paths[word].is_dir():
            matches = TaskManager(include_path=word, include_defaults=False).all_subtasks
            problem = f"{word} holds no task: none of its .yaml files has a `task`. Name another folder."
        else:
            matches = [word]
        if not matches:
            raise RecipeError(f"--harness: {problem}")
        names |= dict.fromkeys(matches)
    return manager, list(names)


def _rows(results: dict[str, Any], about: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns rows of lm_eval's figures, which it keys by `metric,filter` and `metric_stderr,filter`."""
    return [
        {
            "task": task,
            "metric": metric,
            "filter": kind,
            "value": _number(value),
            "stderr": _number(figures.get(f"{metric}_stderr,{kind}")),
            "samples": results["n-samples"].get(task, {}).get("effective"),
            "num_fewshot": results["n-shot"].get(task),
            "version": results["versions"].get(task),
            **about,
        }
        for task, figures in results["results"].items()
        for key, value in figures.items()
        for metric, comma, kind in [key.partition(",")]
        if comma and not metric.endswith("_stderr")
    ]


def results_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the rows of `evaluate_harness` as a table for people."""
    shown = plain_table("task", "metric", "value", "± error", "questions", "examples", right=_NUMBERS)
    for row in rows:
        error = "" if row["stderr"] is None else f"{row['stderr']:.4f}"
        value = "" if row["value"] is None else f"{row['value']:.4f}"
        counts = ("" if row[key] is None else f"{row[key]:,}" for key in ("samples", "num_fewshot"))
        shown.add_row(row["task"], metric_of(row), value, error, *counts)
    return shown


def _number(value: Any) -> float | None:
    """Returns a number for JSON, which knows neither NaN nor `N/A`."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Returns the figures kept in a folder, one a task, metric and filter; none if there is no file.

    Raises:
        CheckpointError: If the file is not what `finetune eval --harness` writes.
    """
    file = folder / NAME
    if not file.exists():
        return []
    with CheckpointError.explaining(f"{file} cannot be read", "Restore it from a copy, or remove it."):
        rows: list[dict[str, Any]] = json_files.parse(file.read_bytes())
    if json_files.shape_mismatch(rows, [dict]) is not None or not all(set(row) >= _KEYS for row in rows):
        raise CheckpointError(f"{file} is not what `finetune eval --harness` writes. Move it out of the way.")
    return rows


def add_results(folder: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes figures behind those that are there, and instead of those of the same evaluation; returns the file.

    Raises:
        CheckpointError: If it cannot be read or written.
    """
    file, new = folder / NAME, {_evaluation_of(row) for row in rows}
    kept = [row for row in read_results(folder) if _evaluation_of(row) not in new]
    with CheckpointError.explaining(f"{file} cannot be written", "Let it be written there."):
        atomic_files.write_json(file, [*kept, *rows])
    return file


def metric_of(row: dict[str, Any]) -> str:
    """Returns a figure's metric, with the filter that answers went through if there is one."""
    return str(row["metric"]) if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"

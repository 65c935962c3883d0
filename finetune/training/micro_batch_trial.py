"""Two steps of a recipe, to measure their memory; `micro_batch_search` runs this in processes of its own."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from finetune.config.recipe import load_recipe
from finetune.data.rows.feed import TokenFileFeed
from finetune.distributed import device_selection
from finetune.monitoring.out_of_memory import explain_out_of_memory
from finetune.training.build_run import build_run
from finetune.training.loop import train_step
from finetune.training.micro_batch_search import OUT_OF_MEMORY
from finetune.utils import exit_codes, orphan_watch
from finetune.utils.atomic_files import write_json
from finetune.utils.errors import FinetuneError, MemoryFullError
from finetune.utils.library_imports import silence_libraries
from finetune.utils.quoting import to_stderr


class _Longest:
    """Rows in whose place the longest of them are read."""

    def __init__(self, rows: Any) -> None:
        self._rows, self._order = rows, rows.longest()

    def __getattr__(self, name: str) -> Any:
        read = getattr(self._rows, name)
        return lambda numbers: read(self._order[: len(numbers)])


def main(file: str, report: str) -> int:
    """Takes the steps, and writes the share of the memory that was held, over all ranks."""
    recipe = load_recipe(file, ())
    room = device_selection.available_memory()
    run = build_run(recipe, quiet=True)
    if isinstance(run.feed, TokenFileFeed) and hasattr(run.feed.rows, "longest"):
        # Rows of different lengths: the longest are read in place of any.
        longest: Any = _Longest(run.feed.rows)
        run.feed = replace(run.feed, rows=longest)
    for step in range(run.length.num_steps):
        train_step(run, step)
    share = torch.tensor([device_selection.peak_memory() / room], dtype=torch.float64, device=run.backend.device)
    write_json(Path(report), {"share": run.backend.all_reduce_max(share).item()})
    run.backend.close()
    return 0


def _guarded() -> int:
    try:
        with orphan_watch.end_with_parent(1, always=True):
            return main(*sys.argv[1:])
    except Exception as error:
        if isinstance(error, MemoryFullError) or explain_out_of_memory(error) is not None:
            return OUT_OF_MEMORY
        if not isinstance(error, FinetuneError):
            return exit_codes.say_failure(error)
        to_stderr(f"Error: {error}")
        return exit_codes.USER_ERROR


if __name__ == "__main__":
    silence_libraries()
    exit_codes.exit_with(_guarded())

"""Two steps of a recipe, to see what they take; `sizing` starts this beside each rank, and nothing imports it."""

import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from finetune import exits, parent
from finetune.backend import devices
from finetune.errors import FinetuneError, MemoryFullError
from finetune.files import write_json
from finetune.guard import explain_memory
from finetune.quiet import silence_libraries
from finetune.recipe import load
from finetune.run import build
from finetune.sizing import OUT_OF_MEMORY
from finetune.train import train_step


class Longest:
    """Training rows in whose place the longest are read."""

    def __init__(self, rows: Any) -> None:
        self._rows, self._longest = rows, rows.longest()

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Any) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = self._rows.batch(self._longest[: len(rows)])
        return found

    def num_targets(self, rows: Any) -> int:
        return int(self._rows.num_targets(self._longest[: len(rows)]))


def main(file: str, report: str) -> int:
    """Takes the steps, and writes the share of the memory that was held, over all ranks."""
    recipe = load(file, ())
    room = devices.room()
    run = build(recipe, quiet=True)
    if hasattr(run.data.train, "longest"):
        run.read_from(Longest(run.data.train))
    for step in range(run.length.num_steps):
        train_step(run, step)
    share = torch.tensor([devices.held() / room.total], dtype=torch.float64, device=run.backend.device)
    write_json(Path(report), {"share": run.backend.max(share).item()})
    run.backend.close()
    return 0


def _guarded() -> int:
    try:
        with parent.needed(1, always=True):
            return main(*sys.argv[1:])
    except MemoryFullError:
        return OUT_OF_MEMORY
    except FinetuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return exits.USER_ERROR
    except Exception as error:
        if explain_memory(error) is not None:
            return OUT_OF_MEMORY
        traceback.print_exception(error)
        return 1


if __name__ == "__main__":
    silence_libraries()
    exits.exit_with(_guarded())

"""Times checkpoints: what a step waits for when they are written behind it, and when it waits for the whole save.

    accelerate launch --config_file accelerate_configs/fsdp.yaml scripts/benchmark_save.py

Both ways take turns, and a step is taken before each. Rank 0 prints medians, where the slowest rank counts, and what a
rank's memory grows by. Needs Linux, for the memory.
"""

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from finetune.checkpoint.checkpoint_store import CheckpointStore
from finetune.checkpoint.save_checkpoint import CheckpointWriter
from finetune.checkpoint.snapshot import Snapshot
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import CheckpointSection
from finetune.models.forward_wrapper import unwrap
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun
from finetune.training.loop import train_step
from finetune.utils.library_imports import silence_libraries

GIB = 2.0**30


def recipe(words: argparse.Namespace) -> dict[str, Any]:
    """A Llama of the size that is asked for, on stories of the built-in generator."""
    shape = {"hidden_size": words.width, "intermediate_size": 2 * words.width, "num_hidden_layers": words.layers}
    return {
        "model": {"config": {"model_type": "llama", **shape, "num_attention_heads": 8, "tie_word_embeddings": False}},
        "tokenizer": {"vocab_size": 512},
        "data": {"train": [{"sample": 500}], "sequence_length": 64, "cache_dir": str(words.folder / "cache")},
        "batch": {"global_size": 4, "micro_size": 2},
        "length": {"steps": 10_000},
        "precision": "fp32",
        "output": {"dir": str(words.folder / "run"), "overwrite": True},
    }


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at its highest since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Bench:
    """A run that steps and saves."""

    def __init__(self, run: BuiltRun, folder: Path) -> None:
        self.run, self.step = run, 0
        folder.mkdir(exist_ok=True)
        section = CheckpointSection(keep=1, keep_best_by=None)
        store, snapshot = CheckpointStore(folder), Snapshot(run.backend, None)
        self.saver = CheckpointWriter(store, run.backend, section, snapshot, lambda _: None)

    def take_step(self) -> None:
        train_step(self.run, self.step)
        self.step += 1

    def start(self) -> None:
        network = unwrap(self.run.model)
        self.saver.start(network, self.run.optimizer, {"step": self.step, "validation_loss": None})

    def finish(self) -> None:
        outcome = self.saver.finish()
        if outcome is not None and outcome.error is not None:
            raise SystemExit(f"A save failed: {outcome.error}")

    def seconds(self, *work: Callable[[], None]) -> float:
        """What the slowest rank takes."""
        self.run.backend.barrier()
        began = time.perf_counter()
        for part in work:
            part()
        return self.worst(time.perf_counter() - began)

    def worst(self, value: float) -> float:
        return self.run.backend.all_reduce_max(torch.tensor([value], device=self.run.backend.device)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--saves", type=int, default=7, help="of each kind")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmark_save"), help="on the disk to be measured")
    words = parser.parse_args()
    silence_libraries()
    run = build_run(validate_recipe(recipe(words)), quiet=True)
    bench = Bench(run, words.folder / "run" / "checkpoints")
    bench.take_step()
    before = memory("VmRSS")
    reset_peak()
    first = bench.seconds(bench.start)
    bench.finish()
    grown = bench.worst(memory("VmHWM") - before)
    waits: dict[str, list[float]] = {"behind": [], "whole": []}
    for number in range(2 * words.saves):
        bench.take_step()
        if number % 2:
            waits["whole"].append(bench.seconds(bench.start, bench.finish))
        else:
            waits["behind"].append(bench.seconds(bench.start))
            bench.finish()
    if run.backend.is_main:
        size = sum(path.stat().st_size for path in words.folder.glob("run/checkpoints/*/**/*") if path.is_file())
        behind, whole = (statistics.median(waits[kind]) for kind in ("behind", "whole"))
        print(f"{run.backend.launch.kind} on {run.backend.world_size}: a checkpoint of {size / GIB:.2f} GiB")
        print(f"  a step waits {behind:.3f} s (the first time {first:.3f} s), for a whole save {whole:.3f} s")
        print(f"  that is {behind / whole:.1%}; over {words.saves} saves of each kind, which took turns:")
        for kind, seconds in waits.items():
            print(f"    {kind:7s}" + "".join(f" {value:.3f}" for value in seconds))
        print(
            f"  a rank grows {grown / GIB:.2f} GiB at most; its share is {size / run.backend.world_size / GIB:.2f} GiB"
        )
        shutil.rmtree(words.folder)
    run.backend.close()


if __name__ == "__main__":
    main()

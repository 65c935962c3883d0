"""What a run says of itself: `metrics.jsonl` first, then a progress bar and trackers."""

import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from finetune import gpus
from finetune.backend import Backend
from finetune.files import Journal
from finetune.quantization import num_weights


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak rate in FLOP/s where it is known, else None."""
    if device.type != "cuda" or precision == "fp32":
        return None
    gpu = gpus.of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16_tflops * 1e12


def flops_per_target(network: nn.Module, sequence_length: int) -> float:
    """Training FLOPs a token: 6 a weight in a matrix product (4 if it is frozen), and attention's scores.

    Source: Kaplan et al. 2020, Chowdhery et al. 2022 (PaLM, appendix B): 6N + 12 layers x width x T. Of the 6, 2 are
    for the weight's own gradient.
    """
    config = getattr(network, "config", None)
    text = None if config is None else config.get_text_config()
    # A tied embedding is also the head, and multiplied as such.
    looked_up: set[int] = set()
    if text is not None and not getattr(text, "tie_word_embeddings", False):
        looked_up = {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    products = sum(
        (6.0 if p.requires_grad else 4.0) * num_weights(p)
        for name, p in network.named_parameters()
        # The frozen one beside a module that is trained whole, which runs in its place.
        if id(p) not in looked_up and ".original_module." not in name
    )
    layers, width = getattr(text, "num_hidden_layers", 0), getattr(text, "hidden_size", 0)
    return products + 12.0 * layers * width * sequence_length


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held so far, in GiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stopwatch:
    """Splits time into named parts without making the host wait for the device.

    On a GPU, parts are measured between events, and read when the totals are asked for.
    """

    def __init__(self, device: torch.device, also: Callable[[str], None] = lambda name: None) -> None:
        """`also` is told of each mark."""
        self._cuda = device.type == "cuda"
        self._also = also
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """The time from here to the next mark belongs to `name`."""
        self._also(name)
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def totals(self) -> dict[str, float]:
        """Seconds a name since the last call. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            totals[name] = totals.get(name, 0.0) + seconds
        self._marks = self._marks[-1:]
        return totals


class Reporter:
    """Writes metrics on rank 0, and shows progress there: a bar on a terminal, a few lines elsewhere."""

    def __init__(self, backend: Backend, directory: Path, num_steps: int, *, quiet: bool) -> None:
        self._backend = backend
        self._main = backend.is_main
        self._quiet = quiet or not self._main
        self._num_steps = num_steps
        self._last_line = 0.0
        self._journal = Journal(directory / "metrics.jsonl")
        self.console = Console(stderr=True, highlight=False, quiet=self._quiet, soft_wrap=True)
        self._progress: Progress | None = None
        if self.console.is_terminal and not self._quiet and num_steps:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("training", total=num_steps, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if (reason := self._journal.close()) is not None:
            self.warn(f"Cannot write {reason}. Its last lines are lost.")

    def log(self, values: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`, and the same to the trackers; rank 0 only. What is not finite becomes null."""
        if not self._main:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        if (reason := self._journal.write(finite)) is not None:
            self.warn(f"Cannot write {reason}. It is kept in memory, and tried again.")
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if self._backend.accelerator.trackers:
            self._backend.accelerator.log(numbers, step=int(values["step"]))

    def step(self, step: int, values: dict[str, Any] | None) -> None:
        """Shows that a step is done; `values` on log steps."""
        if self._progress is not None:
            if values is not None:
                figures = f"loss {values['loss']:.4f}  {_rate(values)}"
                self._progress.update(self._task, figures=figures)
            self._progress.update(self._task, completed=step)
        elif values is not None and (time.monotonic() - self._last_line > 30 or step == self._num_steps):
            # Not a terminal: a line now and then, so that a log file shows life but stays short.
            self._last_line = time.monotonic()
            self.say(
                f"step {step}/{self._num_steps}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  {_rate(values)}"
            )

    def warn(self, text: str) -> None:
        """A line that people must see, on rank 0, also where they asked for errors only."""
        if self._main:
            warn(text)

    def say(self, text: str) -> None:
        """A line for people, on rank 0."""
        if not self._quiet:
            self.console.print(text, markup=False)
            sys.stderr.flush()


def _rate(values: dict[str, Any]) -> str:
    rate = values["tokens_per_s"]
    return "compiling" if rate is None else f"{rate:,.0f} tok/s"


def warn(text: str) -> None:
    """A line that people must see, on whatever rank."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)
    sys.stderr.flush()

"""Metrics: `metrics.jsonl` first, then a progress bar and trackers; and the time of the phases of steps."""

import math
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from rich.progress import Progress, TextColumn

from finetune.config.recipe_schema import GuardSection
from finetune.distributed.backend import Backend
from finetune.monitoring.alerts import send_alert
from finetune.monitoring.trackers import Trackers, add_samples
from finetune.utils.atomic_files import Journal
from finetune.utils.console import plain_console, progress_bar
from finetune.utils.platforms import peak_bytes
from finetune.utils.quoting import to_stderr


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held so far, in GiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_bytes() / 2**30


class Reporter:
    """Writes metrics on rank 0, and shows progress there: a bar on a terminal, a line for each log step elsewhere."""

    def __init__(
        self, backend: Backend, directory: Path, num_steps: int, *, trackers: Trackers, quiet: bool, guard: GuardSection
    ) -> None:
        """`trackers` hear what `metrics.jsonl` does, while the reporter is entered."""
        self._main, self._guard, self._directory = backend.is_main, guard, directory
        self._num_steps = num_steps
        self._journal, self._machines = Journal(directory / "metrics.jsonl"), Journal(directory / "machines.jsonl")
        self._samples: deque[dict[str, Any]] = deque()  # which trackers hear with the next line
        self._trackers = trackers
        self.console = plain_console(stderr=True, quiet=quiet or not self._main, soft_wrap=True)
        self._progress: Progress | None = None
        if self.console.is_terminal and not self.console.quiet and num_steps:
            figures = TextColumn("{task.fields[loss]}{task.fields[validation]}{task.fields[rate]}")
            self._progress = progress_bar(self.console, TextColumn("step {task.completed}/{task.total}"), figures)
            self._task = self._progress.add_task("training", total=num_steps, loss="", validation="", rate="")

    def __enter__(self) -> Self:
        if self._main:
            self._warn_all(self._trackers.open())
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        for journal in (self._journal, self._machines):
            if (reason := journal.close()) is not None:
                self.warn(reason)
        self._warn_all(self._trackers.close())

    def log(self, values: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`, and the same to the trackers; rank 0 only. What is not finite becomes null."""
        if not self._main:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = {**finite, "time": round(time.time(), 3)}
        if (reason := self._journal.write(line)) is not None:
            self.warn_unwritten(reason)
        if "validation_loss" in values and self._progress is not None:
            self._progress.update(self._task, validation=f"val {values['validation_loss']:.4f}  ")
        # The thread that samples may add one meanwhile.
        self._warn_all(
            self._trackers.add(add_samples(line, [self._samples.popleft() for _ in range(len(self._samples))]))
        )

    def log_machine(self, sample: dict[str, Any]) -> None:
        """One line of `machines.jsonl`, on rank 0 and in one thread. Trackers hear it with the next line of metrics."""
        if (reason := self._machines.write(sample)) is not None:
            self.warn_unwritten(reason)
        self._samples.append(sample)

    def step(self, step: int, values: dict[str, Any] | None) -> None:
        """Shows that a step is done; `values` on log steps."""
        figures: dict[str, Any] = {}
        if values is not None:
            rate = values["tokens_per_s"]
            figures["loss"] = f"loss {values['loss']:.4f}  "
            figures["rate"] = "compiling" if rate is None else f"{rate:,.0f} targets/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, **figures)
        elif values is not None:
            self.say(f"step {step}/{self._num_steps}  {figures['loss']}lr {values['lr']:.2e}  {figures['rate']}")

    def warn(self, text: str) -> None:
        """A line that people must see, on rank 0, also where they asked for errors only."""
        if self._main:
            to_stderr(text)

    def warn_unwritten(self, text: str) -> None:
        """As `warn`, of what cannot be written, with an alert."""
        self.warn(text)
        if self._main:
            send_alert(self._guard, "write_failed", text, {"run": str(self._directory)})

    def _warn_all(self, problems: list[str]) -> None:
        for problem in problems:
            self.warn(problem)

    def say(self, text: str) -> None:
        """A line for people, on rank 0."""
        self.console.print(text)
        sys.stderr.flush()


class PhaseTimer:
    """Splits time into named parts without making the host wait for the device.

    On a GPU, parts are measured between events, and read when the totals are asked for.
    """

    def __init__(self, device: torch.device, also: Sequence[Callable[[str], None]] = ()) -> None:
        """Each of `also` is told of each mark."""
        self._cuda = device.type == "cuda"
        self._also = also
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """The time from here to the next mark belongs to `name`."""
        for tell in self._also:
            tell(name)
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
        totals: defaultdict[str, float] = defaultdict(float)
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            totals[name] += start.elapsed_time(end) / 1000 if self._cuda else end - start
        self._marks = self._marks[-1:]
        return dict(totals)

"""What a user sees while a native op is compiled."""

import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def console() -> Console:
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


class Report(AbstractContextManager["Report"]):
    """What the user sees of one op: a line at the start and at the end, on a terminal a bar between them."""

    def __init__(self, op: str, used_by: str, build_s: float, log: Path, *, quiet: bool) -> None:
        """Reports on the build of `op`, which writes to `log` and took `build_s` seconds on 2 cores."""
        self.op = op
        self.used_by = used_by
        self.build_s = build_s
        self.log = log
        self.quiet = quiet
        self.console = console()
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.said: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def building(self) -> None:
        self._show(f"Building DeepSpeed's native op {self.op} ({self.used_by})")

    def waiting(self, why: str) -> None:
        self._show(f"Waiting for DeepSpeed's native op {self.op} ({self.used_by}): {why}")
        self.progress()

    def progress(self) -> None:
        """Reads how far the build is from its log, so that a process that waits can show it too."""
        if self.bar is None or self.task is None:
            return
        with suppress(OSError):
            steps = re.findall(r"^\[(\d+)/(\d+)\] ", self.log.read_text(errors="replace"), re.MULTILINE)
            if steps:
                done, total = map(int, steps[-1])
                self.bar.update(self.task, completed=done, total=total, steps=f"{done} of {total} steps")

    def done(self, seconds: float) -> None:
        if not self.quiet:
            self.console.print(f"Built {self.op} in {duration(seconds)}")

    def _show(self, text: str) -> None:
        if self.quiet or text in self.said:
            return
        self.said.add(text)
        self.console.print(f"{text}; usually about {duration(self.build_s)} on 2 cores")
        if self.console.is_terminal and self.bar is None:
            columns = BarColumn(bar_width=30), TextColumn("{task.fields[steps]}"), TimeElapsedColumn()
            self.bar = Progress(TextColumn(f"  {self.op}"), *columns, console=self.console, transient=True)
            self.task = self.bar.add_task("", total=None, steps="")
            self.bar.start()

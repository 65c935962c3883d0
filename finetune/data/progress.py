"""A progress bar of documents, on a terminal only: a log file gets nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


@contextmanager
def documents_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Shows documents done and documents/s while open; yields what each further number goes to."""
    if quiet or not sys.stderr.isatty():
        yield lambda count: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), _Rate(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda count: progress.advance(task, count)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed):,} documents, {task.speed or 0:,.0f}/s")

"""Progress bars of documents and rows, on a terminal only: a log file gets nothing but what is said."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.progress import (
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)

from finetune.utils.console import plain_console, progress_bar


class Bar:
    """Documents that are done, and how far into the files they reach."""

    def __init__(self, display: Progress) -> None:
        self._display = display  # with one task
        self._documents = 0

    def say(self, text: str) -> None:
        """One line, on a terminal or in a log."""
        self._display.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def start(self, done: int) -> None:
        """Begins at so many bytes of the files, which do not count for the rate."""
        self._documents = 0
        self._display.reset(self._display.task_ids[0], completed=done)

    def advance(self, documents: int, done: int = 0) -> None:
        """Shows that some more documents are done, and so many bytes of the files with them."""
        if self._display.disable:
            return
        self._documents += documents
        rate = self._documents / (self._display.tasks[0].elapsed or 1e-9)
        shown = f"{self._documents:,} documents, {rate:,.0f}/s"
        self._display.update(self._display.task_ids[0], completed=done, documents=shown)


@contextmanager
def rows_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with the time left while open; it is advanced by how many more rows are done."""
    columns = (TextColumn("{task.description}"), MofNCompleteColumn())
    console, hidden = plain_console(stderr=True), not sys.stderr.isatty()
    with progress_bar(console, *columns, transient=True, disable=hidden) as display:
        task = display.add_task(title, total=total)
        yield lambda rows: display.advance(task, rows)


@contextmanager
def documents_bar(title: str, sizes: Sequence[int | None], *, quiet: bool) -> Iterator[Bar]:
    """A bar with documents done and documents/s while open; with total and time left where all sizes are known.

    Args:
        sizes: Bytes of each source's files; None where nobody knows.
        quiet: Show and say nothing.
    """
    total = sum(size or 0 for size in sizes) if None not in sizes else None
    documents = TextColumn("{task.fields[documents]}")
    last = TimeElapsedColumn() if total is None else TaskProgressColumn()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), documents, last)
    console = plain_console(stderr=True, quiet=quiet)
    hidden = quiet or not sys.stderr.isatty()
    with progress_bar(console, *columns, known=total is not None, transient=True, disable=hidden) as display:
        display.add_task(title, total=total, documents="")
        yield Bar(display)

"""The console for what people read."""

import io
import sys
from contextlib import suppress
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table


class _Lenient(io.FileIO):
    """A file that takes what cannot be written."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def outlive_readers() -> None:
    """Has output that nobody can read any more dropped, where a failing print would end what is at work.

    So it is when the terminal is closed (EIO), when what a pipe leads to has ended (EPIPE), and on a full disk. Streams
    that a program or a notebook has put in place of Python's own stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), _Lenient):
            continue
        with suppress(OSError):
            stream.flush()
        file: Any = _Lenient(stream.fileno(), "w", closefd=False)
        lenient = io.TextIOWrapper(
            file if stream.write_through else io.BufferedWriter(file),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)
        setattr(sys, f"__{name}__", lenient)


def plain_console() -> Console:
    """Prints texts as they are; wraps them at words on a terminal, and nothing elsewhere."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.soft_wrap, console.width = True, 1000
    return console


def progress_bar(console: Console, *columns: ProgressColumn, known: bool = True, **options: Any) -> Progress:
    """Progress in one line: the bar takes the room that the columns leave, and these are not wrapped.

    Args:
        columns: What stands before the bar.
        known: Whether the end is known; else there is no bar, and no time left.
        options: More of `Progress`.
    """
    if known:
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
        columns += (bar, TimeRemainingColumn(table_column=Column(no_wrap=True)), TextColumn("left"))
    return Progress(*columns, console=console, expand=known, **options)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines around it, which cuts nothing off; columns without names get no head.

    Args:
        right: The columns that are aligned on the right.
    """
    table = Table(box=None, pad_edge=False, show_header=any(columns), padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=number == 0, overflow="fold")
    return table

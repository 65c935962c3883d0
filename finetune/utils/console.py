"""The console for what people read."""

from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column, Table


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

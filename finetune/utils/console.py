"""Console output for people."""

from collections.abc import Iterator
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table

from finetune.utils.quoting import visible


class _VisibleConsole(Console):
    """A console on which texts are no commands, neither of the terminal nor of rich's markup."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


def plain_console(**options: Any) -> Console:
    """Returns a console that prints texts as they are, and wraps them at words on a terminal only."""
    console = _VisibleConsole(highlight=False, markup=False, **options)
    if not console.is_terminal and "soft_wrap" not in options:
        console.soft_wrap, console.width = True, 1000
    return console


def progress_bar(console: Console, *columns: ProgressColumn, known: bool = True, **options: Any) -> Progress:
    """Returns a progress display of one line, whose bar takes the room that the columns before it leave.

    If the end is not `known`, there is no bar, and no time left. The options are those of `Progress`.
    """
    if known:
        bar = BarColumn(bar_width=None, table_column=Column(ratio=1))
        columns += (bar, TimeRemainingColumn(table_column=Column(no_wrap=True)), TextColumn("left"))
    return Progress(*columns, console=console, expand=known, **options)


def plain_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Returns a table without lines, which cuts nothing off; columns without names get no head."""
    table = Table(box=None, pad_edge=False, show_header=any(columns), padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=number == 0, overflow="fold")
    return table

"""The console for what people read."""

from typing import Literal

from rich.console import Console
from rich.table import Table


def plain_console() -> Console:
    """Prints texts as they are. Where there is no terminal, tables are as wide as what is in them."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 1000
    return console


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

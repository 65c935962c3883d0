"""Plain data that `body.html` draws a page of: tables, texts, and sections of them. All text is escaped there."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table; without a head its first column holds names."""

    head: Sequence[object]
    rows: Sequence[Sequence[object]]
    numbers: Collection[int] = ()
    """Columns that are set to the right."""
    title: str = ""
    """Shown above it."""
    folded: bool = False
    """True if a click on its title shows it."""


@dataclass(frozen=True)
class Text:
    """A text that keeps its lines."""

    title: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page under its heading."""

    key: str
    title: str
    parts: Sequence[Table | Text] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Summary:
    """The beginning of a page."""

    title: str
    status: str = ""
    """The run's `Status`."""
    said: str = ""
    """Stands beside the title."""
    about: str = ""
    done: float | None = None
    """Share of the steps that are taken, where it is known."""
    tiles: Sequence[tuple[str, str]] = ()
    """Figures, and what they are."""
    table: Table | None = None

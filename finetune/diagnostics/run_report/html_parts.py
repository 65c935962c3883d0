"""Pieces of HTML. All text is escaped here; only `Html` is taken as it is."""

from collections.abc import Iterable, Sequence
from html import escape


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Any value, escaped."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def join(parts: Iterable[object], between: str = "\n") -> Html:
    """Pieces, escaped and put together."""
    return Html(between.join(text(part) for part in parts))


def tag(name: str, *content: object, **attributes: object) -> Html:
    """An element. `class_` is its class; `_` in other names stands for `-`; None leaves an attribute out."""
    words = [name]
    for key, value in attributes.items():
        if value is not None:
            words.append(f'{key.rstrip("_").replace("_", "-")}="{text(value)}"')
    return Html(f"<{' '.join(words)}>{join(content, '')}</{name}>")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, numbers: Sequence[int] = ()) -> Html:
    """A table in a box of its own that scrolls sideways.

    Args:
        numbers: Columns that are set to the right.
    """

    def cell(kind: str, column: int, value: object) -> Html:
        return tag(kind, value, class_="number" if column in numbers else None)

    lines = [tag("tr", *[cell("td", column, value) for column, value in enumerate(row)]) for row in rows]
    top = tag("thead", tag("tr", *[cell("th", column, value) for column, value in enumerate(head)])) if head else ""
    return tag("div", tag("table", top, tag("tbody", *lines)), class_="scroll")


def facts(rows: Iterable[tuple[object, object]]) -> Html:
    """A table of names and values."""
    lines = [tag("tr", tag("th", name), tag("td", value)) for name, value in rows]
    return tag("div", tag("table", tag("tbody", *lines)), class_="scroll")


def section(title: str, *content: object, key: str | None = None) -> Html:
    """A part of the page under its heading."""
    return tag("section", tag("h2", title), *content, id=key)


def folded(title: object, *content: object, key: str, is_open: bool = False) -> Html:
    """What is shown on a click."""
    inside = join((tag("summary", title), *content), "")
    return Html(f'<details id="{text(key)}"{" open" if is_open else ""}>{inside}</details>')

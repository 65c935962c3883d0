"""`finetune docs`: the pages of the documentation that ship with the package, in the terminal."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import shipped_path

_MOST_FOUND = 8

# Measurements and tables, which mention everything and explain little; found last.
_MEASURED = {
    *("architectures", "benchmarks", "gpu", "plan-accuracy", "preference-table", "resume-matrix", "support", "versions")
}


@dataclass(frozen=True)
class PageSection:
    """A part of a page under a heading of its own."""

    page: str
    heading: str
    text: str


def doc_pages() -> dict[str, Path]:
    """Returns the pages by name, such as `launch` and `tutorials/first-run`."""
    folder = shipped_path("docs")
    return {str(file.relative_to(folder).with_suffix("")): file for file in sorted(folder.rglob("*.md"))}


def show_docs(words: list[str], console: Console) -> None:
    """Prints the pages, a page by its name, or the sections with all words; a `RecipeError` without any."""
    pages = doc_pages()
    if not words:
        for name, file in pages.items():
            console.print(f"{name:28}{next(_sections(name, file.read_text(encoding='utf-8'))).heading}")
        console.print("\n`finetune docs NAME` shows a page, `finetune docs WORD …` finds what explains something.")
        return
    named = next((name for name in pages if words == [name] or words == [name.rpartition("/")[2]]), None)
    if named is not None:
        with console.pager(styles=True) if console.is_terminal else nullcontext():
            console.print(Markdown(pages[named].read_text(encoding="utf-8")))
        return
    sections = find_sections(words, pages)
    if not sections:
        raise RecipeError(f"No page explains '{' '.join(words)}'. `finetune docs` lists the pages.")
    best, *others = sections
    console.print(Markdown(f"{best.text}\n\n*From the page {best.page}.*"))
    if others:
        console.print("\nAlso:")
        for section in others[:_MOST_FOUND]:
            console.print(f"{section.page:28}{section.heading}")


def find_sections(words: list[str], pages: dict[str, Path]) -> list[PageSection]:
    """Returns the sections in which words with the same beginnings stand, those with them in the heading first."""
    # "stopping" is found in "stop early": four letters are the stem of most words.
    stems = [re.compile(rf"\b{re.escape(word[: max(4, len(word) - 4)].lower())}") for word in words]
    ranked = []
    for name, file in pages.items():
        for section in _sections(name, file.read_text(encoding="utf-8")):
            text, heading = section.text.lower(), section.heading.lower()
            if all(stem.search(text) for stem in stems):
                in_heading = sum(bool(stem.search(heading)) for stem in stems)
                density = min(len(stem.findall(text)) for stem in stems) / (len(text) + 500)
                ranked.append((name in _MEASURED, -in_heading, -density, section))
    return [section for *_, section in sorted(ranked, key=lambda found: found[:3])]


def _sections(page: str, text: str) -> Iterator[PageSection]:
    # Comments in blocks of shell code begin with `#` too.
    fences = re.sub(r"(?ms)^```.*?^```", lambda block: block[0].replace("\n#", "\n\0"), text)
    for section in re.split(r"(?m)^(?=#{1,3} )", fences):
        if section.strip():
            section = section.replace("\0", "#")
            heading = section.partition("\n")[0].lstrip("# ")
            yield PageSection(page, heading, section.strip())

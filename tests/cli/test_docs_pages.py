"""`finetune docs`: pages by name, and what explains something."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT

from finetune.cli import main
from finetune.cli.docs_pages import doc_pages, find_sections


def test_pages_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["docs"]) == 0
    listed = capsys.readouterr().out
    assert "launch                      Launch files" in listed
    assert "tutorials/first-run" in listed
    for name in ("export", "first-run", "tutorials/first-run"):
        assert main.main(["docs", name]) == 0
        title = doc_pages()["tutorials/first-run" if "first" in name else name].read_text().partition("\n")[0]
        assert title.lstrip("# ") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "page", "heading"),
    [
        ("early stopping", "evaluate", "Early stopping"),
        ("qlora", "tutorials/qlora-to-served", "From QLoRA to a served model"),
        ("resume", "checkpoints", "Resume"),
        ("serve", "tutorials/qlora-to-served", "Serve it"),
        ("packing", "data", "Choose a packing"),
        ("learning rate", "recipe", "The learning rate and its schedule"),
        ("warm-up", "recipe", "The learning rate and its schedule"),
    ],
)
def test_words_find_what_explains_them(words: str, page: str, heading: str) -> None:
    found = [(section.page, section.heading) for section in find_sections(words.split(), doc_pages())]
    assert (page, heading) in found[:3], found[:5]


def test_what_is_nowhere_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["docs", "xyzzy", "plugh"]) == 2
    assert "No page explains 'xyzzy plugh'. `finetune docs` lists the pages." in capsys.readouterr().err


def messages(file: Path) -> Iterator[str]:
    """Texts of a module that are no docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    notes = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in notes:
            yield node.value


def test_pages_that_messages_name_are_there() -> None:
    said = [text for file in (ROOT / "finetune").rglob("*.py") for text in messages(file)]
    named = {name for text in said for name in re.findall(r"`finetune docs ([a-z/-]+)`", text)}
    assert {"recipe", "architectures"} <= named <= doc_pages().keys()
    # Whoever installed the wheel has no docs folder.
    assert [text for text in said if re.search(r"docs/[\w-]+\.md", text)] == []

"""Texts of strangers: no terminal, shell or file takes them for its own."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.utils.console import plain_console
from finetune.utils.quoting import shell_command, to_stderr, visible

WORDS = ["", "a b", "it's", "two\nlines", "\ttab\\", "\u2028'\x85\\n$x `y`", "é", "\x1b[2J", "$'x'", "\x011", "\udcff"]


def test_bash_reads_each_word_as_it_is_from_one_line() -> None:
    command = shell_command(["printf", "%s\\0", *WORDS])
    assert len(command.splitlines()) == 1
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout.decode(errors="surrogateescape").split("\0")[:-1] == WORDS


@settings(deadline=None)
@given(st.text())
def test_a_terminal_obeys_nothing_that_is_printed(text: str) -> None:
    shown = visible(text)
    assert all(letter in "\t\n" or letter.isprintable() or ord(letter) > 0x9F for letter in shown)
    assert not {chr(code) for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))} & {
        *shown
    }
    assert visible(shown) == shown
    if text.isprintable():
        assert shown == text


def test_each_way_to_print_is_visible(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (plain_console(file=sys.stderr), plain_console(file=sys.stderr, force_terminal=True)):
        console.print("[red]\x1b]0;title\x07\x9b2J", style="bold" if console.is_terminal else None)
    to_stderr("\x1b]0;title")
    plain, styled, line = capsys.readouterr().err.splitlines()
    assert (plain, line) == ("[red]\\x1b]0;title\\x9b2J", "\\x1b]0;title")
    assert "[red]\\x1b]0;title\\x9b2J" in styled
    assert styled.startswith("\x1b[1m")

"""Text for another medium, in which no character is taken for a command: terminals, and lines of a shell."""

import re
import shlex
import sys
from collections.abc import Iterable

# Control characters but tab and line feed, and those that turn the direction of text, all of which terminals obey; and
# halves of characters, which cannot be printed.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Returns a text for a terminal, with escapes for the characters that it would obey."""
    return _OBEYED.sub(lambda found: repr(found.group())[1:-1], text)


def to_stdout(text: str, end: str = "\n") -> None:
    """Prints a text, which may be a stranger's, for people."""
    print(visible(text), end=end, flush=True)


def to_stderr(text: str) -> None:
    """Prints a line, which may be a stranger's, on stderr."""
    print(visible(text), file=sys.stderr, flush=True)


def shell_command(words: Iterable[str]) -> str:
    """Returns a command as one line for bash, also in a comment or a block of YAML, whatever its words hold."""
    return " ".join(map(shell_word, words))


def shell_word(word: str) -> str:
    """Returns a word of `shell_command`. Source: bash's manual, "ANSI-C Quoting"."""
    if word.isprintable():
        return shlex.quote(word)
    letters = (
        re.sub(r"[\\']", r"\\\g<0>", letter)
        if letter.isprintable()
        else "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))
        for letter in word
    )
    return f"$'{''.join(letters)}'"

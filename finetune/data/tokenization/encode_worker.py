"""Texts to token numbers. As a script it is one tokenising process, which imports nothing else of this package.

Frames on standard input and output, each an 8-byte length and that many bytes. First in comes the tokenizer's
JSON. Then each frame in holds texts and each frame out their tokens, both as `join` writes them.
"""

import os
import signal
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import IO, TypeAlias

from tokenizers import Tokenizer

Numbers: TypeAlias = "memoryview[int] | array[int]"
"""Of 32 bits each. NumPy would take longer to import than all else here."""


def open_tokenizer(definition: str) -> Tokenizer:
    """A tokenizer that reads plain text only: `<|endoftext|>` in a document is characters, not an end."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[Numbers, Numbers]:
    """Tokens of some texts: how many each has, and all of them in a row."""
    return flatten([encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)])


def flatten(lists: Sequence[list[int]]) -> tuple[Numbers, Numbers]:
    """Lengths and concatenation of lists of numbers."""
    numbers = array("I")
    for ids in lists:
        numbers.fromlist(ids)
    return array("I", map(len, lists)), numbers


def join(lengths: Numbers, payload: "bytes | Numbers") -> bytes:
    """A count, that many lengths, and what they are the lengths of."""
    return b"".join((struct.pack("<Q", len(lengths)), lengths, payload))


def cut(frame: bytes) -> tuple[memoryview, memoryview]:
    """The reverse of `join`: lengths as numbers, and the rest as bytes."""
    (count,) = struct.unpack_from("<Q", frame)
    whole = memoryview(frame)
    return whole[8 : 8 + 4 * count].cast("I"), whole[8 + 4 * count :]


def texts_of(frame: bytes) -> list[str]:
    """What `join` has made of UTF-8 texts."""
    sizes, payload = cut(frame)
    texts, start = [], 0
    for size in sizes:
        texts.append(str(payload[start : start + size], "utf-8"))
        start += size
    return texts


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Writes one frame."""
    stream.write(struct.pack("<Q", len(frame)))
    stream.write(frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """Reads one frame; None where the other side has closed."""
    header = stream.read(8)
    if len(header) < 8:
        return None
    (size,) = struct.unpack("<Q", header)
    frame = stream.read(size)
    return frame if len(frame) == size else None


def _serve() -> None:
    definition = read_frame(sys.stdin.buffer)
    if definition is None:
        return
    tokenizer = open_tokenizer(definition.decode("utf-8"))
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, join(*encode(tokenizer, texts_of(frame))))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches all processes of a terminal; the one that started us ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()

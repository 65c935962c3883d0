"""Texts to token numbers. Run as a script it is one tokenising process: light, and without a part of us.

Frames on standard input and output, each an 8-byte length and that many bytes. First in comes the tokenizer's
JSON. Then each frame in holds texts and each frame out their tokens, both as `join` writes them.
"""

import itertools
import os
import signal
import struct
import sys
from collections.abc import Sequence
from typing import IO

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

UInt32s = npt.NDArray[np.uint32]


def open_tokenizer(definition: str) -> Tokenizer:
    """A tokenizer that reads plain text only: `<|endoftext|>` in a document is characters, not an end."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[bytes]) -> tuple[UInt32s, UInt32s]:
    """Tokens of some UTF-8 texts: how many each has, and all of them in a row."""
    encodings = tokenizer.encode_batch_fast([text.decode("utf-8") for text in texts], add_special_tokens=False)
    return flatten([encoding.ids for encoding in encodings])


def flatten(lists: Sequence[Sequence[int]]) -> tuple[UInt32s, UInt32s]:
    """Lengths and concatenation of lists of numbers."""
    lengths = np.fromiter((len(ids) for ids in lists), np.uint32, len(lists))
    numbers = np.fromiter(itertools.chain.from_iterable(lists), np.uint32, int(lengths.sum()))
    return lengths, numbers


def join(lengths: UInt32s, payload: bytes) -> bytes:
    """A count, that many lengths, and what they are the lengths of."""
    return struct.pack("<Q", lengths.size) + lengths.tobytes() + payload


def cut(frame: bytes) -> tuple[UInt32s, memoryview]:
    """The reverse of `join`."""
    (count,) = struct.unpack_from("<Q", frame)
    lengths = np.frombuffer(frame, np.uint32, count, offset=8)
    return lengths, memoryview(frame)[8 + 4 * count :]


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
        sizes, payload = cut(frame)
        ends = np.cumsum(sizes, dtype=np.int64)
        texts = [bytes(payload[end - size : end]) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]
        lengths, numbers = encode(tokenizer, texts)
        write_frame(sys.stdout.buffer, join(lengths, numbers.tobytes()))


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches all processes of a terminal; the one that started us ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve()

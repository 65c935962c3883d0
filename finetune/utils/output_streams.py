"""Standard output and error that end no process when nobody can read them any more."""

import io
import sys
from contextlib import suppress
from typing import Any


class _Lenient(io.FileIO):
    """A file that drops what it cannot write."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def outlive_readers() -> None:
    """Drops output that nobody can read any more, instead of ending the process.

    A print fails when the terminal is closed (EIO), when the reader of a pipe has ended (EPIPE), and on a full disk.
    Streams that a program or a notebook has put in place of Python's own stay as they are.
    """
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None or stream is not getattr(sys, f"__{name}__"):
            continue
        if isinstance(getattr(stream.buffer, "raw", stream.buffer), _Lenient):
            continue
        with suppress(OSError):
            stream.flush()
        file: Any = _Lenient(stream.fileno(), "w", closefd=False)
        lenient = io.TextIOWrapper(
            file if stream.write_through else io.BufferedWriter(file),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lenient)
        setattr(sys, f"__{name}__", lenient)

"""Which tokens of a token file are targets: one bit each, memory-mapped."""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from finetune.data.tokenization.memmap import Int64s

_CHUNK = 1 << 22  # a multiple of 8


class MaskFile:
    """A finished mask."""

    def __init__(self, path: Path) -> None:
        """Opens what `pack` has written."""
        self._bits: npt.NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, mode="r"))

    def __getitem__(self, places: Int64s) -> npt.NDArray[np.bool_]:
        """Whether the tokens at some places are targets."""
        return np.asarray(self._bits[places >> 3] >> (places & 7) & 1, np.bool_)

    def counts(self, starts: Int64s, lengths: Int64s) -> Int64s:
        """Targets of segments, whose inputs start at `starts`: what is behind each input."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bitwise_count(self._bits), dtype=np.int64)])

        def up_to(places: Int64s) -> Int64s:
            whole, rest = places >> 3, places & 7
            last = self._bits[np.minimum(whole, self._bits.size - 1)]
            below = np.bitwise_count(last & ((1 << rest) - 1).astype(np.uint8))
            return np.asarray(before[whole] + np.where(rest > 0, below, 0), np.int64)

        return up_to(starts + lengths + 1) - up_to(starts + 1)


def pack(loose: Path, path: Path) -> None:
    """Turns a file of one byte a token into one of bits."""
    with loose.open("rb") as source, path.open("wb") as target:
        while chunk := source.read(_CHUNK):
            target.write(np.packbits(np.frombuffer(chunk, np.uint8), bitorder="little").tobytes())

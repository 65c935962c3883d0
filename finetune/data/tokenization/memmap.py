"""Memory-mapped arrays: finished ones, masks, and ones that grow and survive a kill up to a known length."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from finetune.utils.errors import DataError

Int64s = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]

_CHUNK = 1 << 22  # a multiple of 8


def map_array(path: Path, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
    """Opens a .npy file of numbers, memory-mapped.

    Raises:
        DataError: If it holds something else.
    """
    try:
        # A plain view: indexing NumPy's memmap class costs several times as much.
        array = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise damaged_file(path, str(error)) from error
    if array.dtype != dtype or array.ndim != 1:
        raise damaged_file(path, f"it holds {array.dtype} of {array.ndim} dimensions")
    return array


def damaged_file(path: Path, why: str) -> DataError:
    """The error for a file in the cache that is not what was written there."""
    return DataError(f"The file {path} of the data cache is damaged: {why}. Delete {path.parent}; it is made again.")


class GrowingArray:
    """Numbers in a file that only grows."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        """Opens the file behind what it holds, or creates it."""
        self.path = path
        self._dtype: np.dtype[Any] = np.dtype(dtype)
        self._file = path.open("ab")
        self._size = os.fstat(self._file.fileno()).st_size // self._dtype.itemsize
        self._digest = xxhash.xxh3_64()

    def __len__(self) -> int:
        return self._size

    def append(self, numbers: npt.NDArray[Any]) -> None:
        """Appends some numbers, which a kill may lose until the next `sync`."""
        data = numbers.astype(self._dtype, copy=False).tobytes()
        self._file.write(data)
        self._digest.update(data)
        self._size += numbers.size

    def view(self) -> npt.NDArray[Any]:
        """All numbers, memory-mapped."""
        self._file.flush()
        if not self._size:
            return np.array([], self._dtype)
        return np.asarray(np.memmap(self.path, self._dtype, mode="r", shape=(self._size,)))

    def cut(self, size: int, digest: str) -> bool:
        """Leaves the first `size` numbers; returns whether they are those that `sync` gave this digest of."""
        self._file.truncate(size * self._dtype.itemsize)
        self._size = size
        self._digest.reset()
        with self.path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                self._digest.update(chunk)
        return self._digest.hexdigest() == digest

    def sync(self) -> str:
        """Returns once everything is on the disk, with a digest of what was written."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._digest.hexdigest()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class MaskFile:
    """The tokens of a token file that are targets: one bit each, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Opens what `pack_mask` has written."""
        self._bits: npt.NDArray[np.uint8] = np.asarray(np.memmap(path, np.uint8, mode="r"))

    def __getitem__(self, places: Int64s) -> npt.NDArray[np.bool_]:
        """Tells which of the tokens at some places are targets."""
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


def pack_mask(loose: Path, path: Path) -> None:
    """Turns a file of one byte a token into one of bits."""
    with loose.open("rb") as source, path.open("wb") as target:
        while chunk := source.read(_CHUNK):
            target.write(np.packbits(np.frombuffer(chunk, np.uint8), bitorder="little").tobytes())

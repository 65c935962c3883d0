"""Files of safetensors, written and read as ranges of bytes, which the library cannot do: it writes whole files only,
and reads local ones.

Their layout: the header's length in 8 bytes, the header, and the tensors, those of wide types first, so that each lies
where its type may. Source: https://huggingface.co/docs/safetensors, "Format".
"""

import io
import json
import math
import mmap
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch

from finetune.checkpoint.integrity import Files, NewFile
from finetune.utils import json_files

# In the order in which they lie in a file. Source: safetensors 0.8, `enum Dtype` in tensor.rs, backwards.
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}

Specs = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of tensors, by name."""


def file_order(dtype: torch.dtype, name: str) -> tuple[int, str]:
    """Returns a key that sorts tensors as they follow each other in a file."""
    return list(_DTYPES).index(dtype), name


class TensorFile:
    """A new file, to which its tensors are appended in `file_order`; an `OSError` if it cannot be written."""

    def __init__(self, file: NewFile, tensors: Specs) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in sorted(tensors, key=lambda name: file_order(tensors[name][0], name)):
            dtype, shape = tensors[name]
            begin, end = end, end + dtype.itemsize * math.prod(shape)
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = file
        file.write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: torch.Tensor) -> None:
        """Writes the next tensor, which is contiguous and on the CPU."""
        if tensor.numel():
            self._file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> Files:
        """Puts the file on the disk, and returns its line of the manifest."""
        return self._file.close()


class TensorReader:
    """Tensors of a file, by name. A local file is mapped: what is not touched is not read.

    Raises:
        OSError: If it cannot be read.
        LookupError: If there is no tensor of a name.
        ValueError: If it is no such file, or its header contradicts itself.
    """

    def __init__(self, file: io.BufferedIOBase) -> None:
        length = int.from_bytes(file.read(8), "little")
        size = file.seek(0, io.SEEK_END)
        if not 0 < length <= size - 8:
            raise ValueError("its header is longer than the file")
        file.seek(8)
        self._header: dict[str, Any] = json_files.parse(file.read(length))
        self._file, self._begin = file, 8 + length
        self._mapped: mmap.mmap | None = None
        with suppress(io.UnsupportedOperation):  # no local file
            self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read(self, name: str) -> torch.Tensor:
        facts = self._header[name]
        dtype, shape, (begin, end) = _BY_NAME[facts["dtype"]], facts["shape"], facts["data_offsets"]
        count = math.prod(shape)
        if min(shape, default=0) < 0 or not 0 <= begin <= end or end - begin != count * dtype.itemsize:
            raise ValueError(f"the header gives {name} another size than its shape")
        if not count:
            return torch.empty(shape, dtype=dtype)
        if self._mapped is not None:
            return torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=self._begin + begin).view(shape)
        self._file.seek(self._begin + begin)
        return torch.frombuffer(bytearray(self._file.read(end - begin)), dtype=dtype, count=count).view(shape)

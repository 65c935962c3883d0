"""A safetensors file that is written tensor by tensor, so that they need not be in memory all at once."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

# In the order in which they lie in a file. Source: safetensors 0.8, `enum Dtype` in tensor.rs, backwards.
_DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """A new file with room for the tensors that it is going to hold.

    Its layout is that of the library, which can write whole files only: the header's length in 8 bytes, the header,
    and the tensors, those of wide types first, so that each lies where its type may.
    Source: https://huggingface.co/docs/safetensors, "Format".
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """
        Args:
            tensors: Type and shape of each tensor, by name.

        Raises:
            OSError: If it cannot be written.
        """
        self._places: dict[str, int] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        order = list(_DTYPES)
        for name in sorted(tensors, key=lambda name: (order.index(tensors[name][0]), name)):
            dtype, shape = tensors[name]
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            self._places[name] = begin
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._begin = 8 + len(text)
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self._put(len(text).to_bytes(8, "little") + text, 0)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes one tensor, which is contiguous and on the CPU.

        Raises:
            OSError: If it cannot be written.
        """
        if tensor.numel():
            self._put(tensor.reshape(-1).view(torch.uint8).numpy().data, self._begin + self._places[name])

    def close(self) -> None:
        """Nothing can be written afterwards."""
        os.close(self._handle)

    def _put(self, content: bytes | memoryview, place: int) -> None:
        view = memoryview(content)
        while view:
            written = os.pwrite(self._handle, view, place)
            view, place = view[written:], place + written

"""A copy of the state in host memory, from which a checkpoint's files are written while training continues."""

import errno
import json
import os
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finetune.checkpoint import integrity
from finetune.distributed.backend import Backend
from finetune.distributed.state import tensor_shards
from finetune.distributed.state.tensor_shards import Block, Exchange, Shard
from finetune.utils.atomic_files import write_json

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


Files = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    """Which rank keeps which tensor, and the file and name that it gets; the same on every rank."""

    owners: dict[str, int]
    """By parameter name."""
    adapter_keys: dict[str, str] | None
    """Names in `adapter_model.safetensors` by parameter, if only adapters are trained."""

    @classmethod
    def divide(cls, sizes: dict[str, int], world: int, adapter_keys: dict[str, str] | None) -> "Layout":
        """Gives the largest tensors out first, each to the rank with the least so far.

        PEFT opens a single file only, so adapters, which are small, all stay on rank 0.
        """
        load = [0] * (1 if adapter_keys is not None else world)
        owners = {}
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            owners[name] = load.index(min(load))
            load[owners[name]] += max(1, sizes[name])
        return cls(owners, adapter_keys)

    def owner(self, key: str) -> int:
        """The rank that keeps a tensor; what is not trained stays on rank 0."""
        return self.owners.get(key.partition("/")[2], 0)

    def place(self, key: str) -> tuple[str, str]:
        """The file of a tensor, relative to the checkpoint, and its name in it."""
        kind, _, name = key.partition("/")
        used = sorted({0, *self.owners.values()})
        number = f"-{used.index(self.owner(key)) + 1:05d}-of-{len(used):05d}" if len(used) > 1 else ""
        if kind not in ("parameter", "frozen", "buffer"):
            return f"optimizer{number}.safetensors", key
        if self.adapter_keys is not None:
            return "model/adapter_model.safetensors", self.adapter_keys[name]
        return f"model/model{number}.safetensors", name


@dataclass(frozen=True)
class _Entry:
    """A tensor of which this rank has kept its piece, or which it is going to put together."""

    key: str
    owner: int
    shape: tuple[int, ...]
    copy: torch.Tensor
    ranks: tuple[int, ...]


class Snapshot:
    """This rank's pieces of the state, and the files that it writes.

    Sharded tensors are put together by the rank that keeps them, one at a time and not before they are written, so
    that a step waits for nothing but the copies. Their memory stays for the next save, since fresh memory costs more
    time than the copying: a rank's share of three fp32 numbers a trained parameter (with Adam).
    """

    def __init__(
        self, backend: Backend, adapter_keys: dict[str, str] | None, infinite: Collection[str] = frozenset()
    ) -> None:
        """
        Args:
            infinite: Buffers that may hold infinities.
        """
        self._backend, self._adapter_keys, self._infinite = backend, adapter_keys, infinite
        self._layout: Layout | None = None
        self._entries: list[_Entry] = []
        self._exchange: Exchange | None = None
        # What each rank has of each tensor that is divided.
        self._blocks: dict[str, list[tuple[Block, ...]]] = {}

    def take(self, network: nn.Module, optimizer: Any) -> None:
        """Copies this rank's pieces, in place of those of the last time. All ranks call it."""
        backend = self._backend
        if self._layout is None:
            self._layout = Layout.divide(backend.sizes(network), backend.world, self._adapter_keys)
        old = {entry.key: entry.copy for entry in self._entries}
        self._entries = []
        blocks: dict[str, tuple[Block, ...]] = {}
        for key, piece in self._read(network, optimizer):
            if piece.ranks:
                blocks[key] = piece.blocks
            owner = self._layout.owner(key)
            if owner in piece.ranks or (not piece.ranks and owner == backend.rank):
                copy = _copy(piece.local, old.get(key))
                self._entries.append(_Entry(key, owner, piece.shape, copy, piece.ranks))
        if blocks:
            self._agree(blocks)
        if backend.device.type == "cuda":
            torch.cuda.synchronize()

    def write(self, staging: Path, part: Path) -> None:
        """Writes this rank's tensors to files, puts these on the disk, and lists them in `part`.

        A rank that cannot write still sends and takes pieces, so that no other waits for it.

        Raises:
            OSError: If a file cannot be written, or a tensor is not finite (`EDOM`).
        """
        problem: OSError | None = None
        files: dict[str, TensorFile] = {}
        try:
            # Not their parents: below a mount that has vanished, that would fill the wrong disk.
            staging.mkdir(exist_ok=True)
            (staging / "model").mkdir(exist_ok=True)
            self._open(staging, files)
        except OSError as error:
            problem = error
        try:
            for entry, whole in self._wholes():
                try:
                    if problem is None:
                        self._put(entry, whole, files)
                except OSError as error:
                    problem = error
        finally:
            for file in files.values():
                file.close()
        if problem is not None:
            raise problem
        described: Files = {}
        for name in files:
            described |= integrity.describe_file(staging, staging / name)
        write_json(part, {"files": described, "tensors": self._listed()})

    def _read(self, network: nn.Module, optimizer: Any) -> Iterator[tuple[str, Shard]]:
        yield from self._backend.read_state(network, optimizer)
        if self._adapter_keys is None:
            yield from self._backend.read_rest(network)

    def _agree(self, blocks: dict[str, tuple[Block, ...]]) -> None:
        """Tells all ranks which piece of which tensor lies where; they must go through them in the same order."""
        backend = self._backend
        order = zlib.crc32("\n".join(blocks).encode())
        largest, smallest = backend.max(torch.tensor([order, -order], device=backend.device)).tolist()
        if largest != -smallest:
            raise RuntimeError("ranks go through the tensors of the state in different orders")
        if blocks.keys() == self._blocks.keys():
            return
        numbers = [tensor_shards.to_numbers(own) for own in blocks.values()]
        longest = int(backend.max(torch.tensor([max(map(len, numbers))], device=backend.device)).item())
        table = torch.zeros(backend.world, len(blocks), longest, dtype=torch.int64, device=backend.device)
        for row, own in zip(table[backend.rank], numbers, strict=True):
            row[: len(own)] = torch.tensor(own)
        found = backend.sum(table).transpose(0, 1).tolist()
        self._blocks = {
            key: [tensor_shards.from_numbers(rank) for rank in ranks] for key, ranks in zip(blocks, found, strict=True)
        }
        if self._exchange is None:
            self._exchange = Exchange()

    def _mine(self) -> Iterator[_Entry]:
        return (entry for entry in self._entries if entry.owner == self._backend.rank)

    def _open(self, staging: Path, files: dict[str, TensorFile]) -> None:
        assert self._layout is not None
        contents: dict[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]] = {}
        for entry in self._mine():
            file, name = self._layout.place(entry.key)
            contents.setdefault(file, {})[name] = (entry.copy.dtype, entry.shape)
        for file, content in contents.items():
            files[file] = TensorFile(staging / file, content)

    def _put(self, entry: _Entry, whole: torch.Tensor, files: dict[str, TensorFile]) -> None:
        assert self._layout is not None
        kind, _, name = entry.key.partition("/")
        infinite = kind == "buffer" and name in self._infinite
        fits = whole.isnan().logical_not() if infinite else whole.isfinite()
        if whole.is_floating_point() and not bool(fits.all()):
            raise OSError(errno.EDOM, f"{entry.key} holds numbers that are not finite")
        file, name = self._layout.place(entry.key)
        files[file].write(name, whole)

    def _wholes(self) -> Iterator[tuple[_Entry, torch.Tensor]]:
        """The tensors that this rank keeps, as one dimension; pieces of others are sent on the way, in equal order."""
        rank = self._backend.rank
        room = max((torch.Size(e.shape).numel() * e.copy.itemsize for e in self._mine() if e.ranks), default=0)
        scratch = torch.empty(room, dtype=torch.uint8)
        for entry in self._entries:
            if not entry.ranks:
                yield entry, entry.copy
            elif entry.owner == rank:
                size = torch.Size(entry.shape).numel() * entry.copy.itemsize
                whole = scratch[:size].view(entry.copy.dtype)
                self._put_together(entry, whole)
                yield entry, whole
            elif entry.copy.numel():
                assert self._exchange is not None
                self._exchange.send(entry.copy, entry.owner)

    def _put_together(self, entry: _Entry, whole: torch.Tensor) -> None:
        assert self._exchange is not None
        shaped = whole.view(entry.shape)
        for rank in entry.ranks:
            blocks = self._blocks[entry.key][rank]
            if rank == entry.owner:
                piece = entry.copy
            elif len(blocks) == 1 and len(blocks[0].whole) == 1:
                # In place.
                self._exchange.receive(blocks[0].within(whole), rank)
                continue
            elif blocks:
                ends = zip(*(block.local for block in blocks), strict=True)
                piece = torch.empty([max(last for _, last in end) for end in ends], dtype=whole.dtype)
                self._exchange.receive(piece, rank)
            for block in blocks:
                block.within(shaped).copy_(block.of(piece))

    def _listed(self) -> dict[str, Any]:
        assert self._layout is not None
        found = {}
        for entry in self._mine():
            file, name = self._layout.place(entry.key)
            found[entry.key] = {"file": file, "name": name, "shape": list(entry.shape)}
        return found


def _copy(tensor: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """A copy in host memory, in place of an older one if that has its size."""
    if old is None or old.shape != tensor.shape or old.dtype != tensor.dtype:
        old = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return old.copy_(tensor, non_blocking=True)

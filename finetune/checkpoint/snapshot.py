"""A copy of the state in host memory, from which a checkpoint's files are written while training continues."""

import errno
import itertools
import math
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import distributed, nn

from finetune.checkpoint.checkpoint_store import CheckpointStore
from finetune.checkpoint.integrity import Files, NewFile
from finetune.checkpoint.tensor_files import TensorFile, file_order
from finetune.distributed.backend import Backend
from finetune.distributed.state import tensor_shards
from finetune.distributed.state.state_transfer import PARAMETER
from finetune.distributed.state.tensor_shards import Block
from finetune.distributed.state.weight_average import AVERAGE


@dataclass(frozen=True)
class _Entry:
    """A tensor of which this rank has kept its piece, or which it is going to put together."""

    key: str
    owner: int
    place: tuple[str, str]
    """Its file, and its name in it."""
    shape: tuple[int, ...]
    copy: torch.Tensor
    ranks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.copy.itemsize


class Snapshot:
    """This rank's pieces of the state, and the files that it writes.

    Sharded tensors are put together by the rank that keeps them, one at a time and not before they are written, so
    that a step waits for nothing but the copies. Their memory stays for the next save, since fresh memory costs more
    time than the copying: a rank's share of three fp32 numbers a trained parameter (with Adam).
    """

    def __init__(
        self, backend: Backend, adapter_keys: dict[str, str] | None, infinite: Collection[str] = frozenset()
    ) -> None:
        """`adapter_keys` are an adapter's names of parameters; `infinite` buffers may be so, such as causal masks."""
        self._backend, self._adapter_keys = backend, adapter_keys
        self._infinite = {f"buffer/{name}" for name in infinite}
        # The rank that keeps each trained tensor, by parameter name, and what belongs to it; the same on every rank.
        self._owners: dict[str, int] = {}
        self._entries: list[_Entry] = []
        # A process group of its own, in host memory: training does not wait while pieces are sent.
        self._group: Any = None
        # What each rank has of each tensor that is divided.
        self._blocks: dict[str, list[tuple[Block, ...]]] = {}

    def take(self, network: nn.Module, optimizer: Any) -> None:
        """Copies this rank's pieces, in place of those of the last time. All ranks call it."""
        backend = self._backend
        if not self._owners:
            # PEFT opens a single file only, so adapters, which are small, all stay on rank 0.
            ranks = backend.world_size if self._adapter_keys is None else 1
            sizes = backend.sizes(network)
            load = [0] * ranks
            # The largest tensors first, each to the rank with the least so far.
            for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
                self._owners[name] = load.index(min(load))
                load[self._owners[name]] += max(1, sizes[name])
        old = {entry.key: entry.copy for entry in self._entries}
        self._entries = []
        blocks: dict[str, tuple[Block, ...]] = {}
        averaged: set[str] = set()
        rest = backend.read_rest(network) if self._adapter_keys is None else ()
        for key, piece in itertools.chain(backend.read_state(network, optimizer), rest):
            if piece.ranks:
                blocks[key] = piece.blocks
            kind, _, name = key.partition("/")
            averaged |= {name} if kind == AVERAGE else set()
            owner = self._owners.get(name, 0)
            if owner in piece.ranks or (not piece.ranks and owner == backend.rank):
                tensor, copy = piece.local, old.get(key)
                if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                copy.copy_(tensor, non_blocking=True)
                self._entries.append(_Entry(key, owner, ("", ""), piece.shape, copy, piece.ranks))
        self._entries = [replace(e, place=self._place(e.key, e.owner, averaged)) for e in self._entries]
        if blocks:
            self._agree(blocks)
        if backend.device.type == "cuda":
            torch.cuda.synchronize()

    def write(self, store: CheckpointStore, name: str) -> dict[str, Any]:
        """Writes this rank's tensors to files of an unsealed checkpoint; returns what it has written.

        All ranks go through the tensors in one order, in which each file is written from its begin to its end. A rank
        that cannot write still sends and takes pieces, so that no other waits for it.

        Raises:
            OSError: If a file cannot be written, or a tensor is not finite (`EDOM`).
        """
        rank = self._backend.rank
        own = [entry for entry in self._entries if entry.owner == rank]
        scratch = torch.empty(max((entry.nbytes for entry in own if entry.ranks), default=0), dtype=torch.uint8)
        files: Files = {}
        problems: list[OSError] = []

        @contextmanager
        def noted() -> Iterator[None]:
            try:
                yield
            except OSError as error:
                problems.append(error)

        for _, group in itertools.groupby(
            sorted(self._entries, key=self._order), key=lambda entry: self._order(entry)[0]
        ):
            entries = list(group)
            target: TensorFile | None = None
            mine = {entry.place[1]: (entry.copy.dtype, entry.shape) for entry in entries if entry.owner == rank}
            with noted():
                if mine and not problems:
                    path = next(entry.place[0] for entry in entries if entry.owner == rank)
                    target = TensorFile(NewFile(store, name, path), mine)
            for entry in entries:
                whole = self._put_together(entry, scratch)
                with noted():
                    if target is not None and whole is not None and not problems:
                        infinite = entry.key in self._infinite
                        fits = whole.isnan().logical_not() if infinite else whole.isfinite()
                        if whole.is_floating_point() and not bool(fits.all()):
                            raise OSError(errno.EDOM, f"{entry.key} holds numbers that are not finite")
                        target.append(whole)
            with noted():
                files |= target.close() if target is not None else {}
        if problems:
            raise problems[0]
        tensors = {e.key: {"file": e.place[0], "name": e.place[1], "shape": list(e.shape)} for e in own}
        return {"files": files, "tensors": tensors}

    def _place(self, key: str, owner: int, averaged: Collection[str]) -> tuple[str, str]:
        kind, _, name = key.partition("/")
        # Averages are the model that others open, and lie there in place of the weights that go on learning.
        if name in averaged and kind in (AVERAGE, PARAMETER):
            kind = PARAMETER if kind == AVERAGE else "learning"
        used = sorted({0, *self._owners.values()})
        number = f"-{used.index(owner) + 1:05d}-of-{len(used):05d}" if len(used) > 1 else ""
        if kind not in (PARAMETER, "frozen", "buffer"):
            return f"optimizer{number}.safetensors", key
        if self._adapter_keys is not None:
            return "model/adapter_model.safetensors", self._adapter_keys[name]
        return f"model/model{number}.safetensors", name

    def _agree(self, blocks: dict[str, tuple[Block, ...]]) -> None:
        """Tells all ranks which piece of which tensor lies where; they must go through them in the same order."""
        backend = self._backend
        order = zlib.crc32("\n".join(blocks).encode())
        largest, smallest = backend.all_reduce_max(torch.tensor([order, -order], device=backend.device)).tolist()
        if largest != -smallest:
            raise RuntimeError("ranks go through the tensors of the state in different orders")
        if blocks.keys() == self._blocks.keys():
            return
        numbers = [tensor_shards.to_numbers(own) for own in blocks.values()]
        longest = int(backend.all_reduce_max(torch.tensor([max(map(len, numbers))], device=backend.device)).item())
        table = torch.zeros(backend.world_size, len(blocks), longest, dtype=torch.int64, device=backend.device)
        for row, own in zip(table[backend.rank], numbers, strict=True):
            row[: len(own)] = torch.tensor(own)
        merged = backend.all_reduce_sum(table).transpose(0, 1).tolist()
        self._blocks = {
            key: [tensor_shards.from_numbers(rank) for rank in ranks] for key, ranks in zip(blocks, merged, strict=True)
        }
        self._group = self._group or distributed.new_group(backend="gloo")

    @staticmethod
    def _order(entry: _Entry) -> tuple[bool, tuple[int, str]]:
        """Weights before the optimiser's state; then as in files, so that those of all ranks grow side by side."""
        return entry.place[0].startswith("optimizer"), file_order(entry.copy.dtype, entry.place[1])

    def _put_together(self, entry: _Entry, scratch: torch.Tensor) -> torch.Tensor | None:
        """Returns a tensor that this rank keeps, as one dimension; of others, sends the piece to the rank that does."""
        if not entry.ranks:
            return entry.copy
        if entry.owner != self._backend.rank:
            if entry.copy.numel():
                distributed.send(_bytes(entry.copy), entry.owner, group=self._group)
            return None
        whole = scratch[: entry.nbytes].view(entry.copy.dtype)
        shaped = whole.view(entry.shape)
        for rank in entry.ranks:
            blocks = self._blocks[entry.key][rank]
            if rank == entry.owner:
                piece = entry.copy
            elif len(blocks) == 1 and len(blocks[0].whole) == 1:
                # In place.
                distributed.recv(_bytes(blocks[0].within(whole)), rank, group=self._group)
                continue
            elif blocks:
                ends = zip(*(block.local for block in blocks), strict=True)
                piece = torch.empty([max(last for _, last in end) for end in ends], dtype=whole.dtype)
                distributed.recv(_bytes(piece), rank, group=self._group)
            for block in blocks:
                block.within(shaped).copy_(block.of(piece))
        return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)

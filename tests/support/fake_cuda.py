"""A CUDA device on a machine without one: its tensors lie in host memory, and CPU kernels compute them.

All that decides where a tensor is says `cuda`: its `device`, the keys by which torch dispatches (so that autocast and
autograd take the branch for CUDA), and the functions of `torch.cuda` that the package and its libraries call. Results
are those of the CPU. What fails on a GPU fails here:

- an operation on tensors of the host and of the device raises (but for numbers, which kernels take from the host);
- a copy to the host that was asked for with `non_blocking` is not there before an event or the device was waited for:
  until then its target holds nonsense;
- what makes the host wait for the device is counted, with its place: reads of values, operations whose result's size
  depends on values, and copies that are not both pinned and `non_blocking`;
- a function that `torch.cuda` does not have, or arguments that it does not take, raise as they do there.

What it cannot show is in docs/gpu.md. Only for a process of its own: it changes torch, and for good.
"""

import ctypes
import functools
import inspect
import itertools
import linecache
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = os.environ.get("CXX", "c++")
NAME = "NVIDIA H100 80GB HBM3"
aten = torch.ops.aten

# They take tensors of several devices; those of the host are sent, which is counted.
_INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}


@dataclass
class Seen:
    """What made the host wait for the device."""

    reads: list[str] = field(default_factory=list)
    """Values read, and operations whose result's size depends on values."""
    copies: list[str] = field(default_factory=list)
    """Copies that are not both pinned and `non_blocking`."""
    calls: Counter[str] = field(default_factory=Counter)
    """Operations on the device, by name."""


SEEN = Seen()


class OnDevice(torch.Tensor):
    """A tensor of the device. It shares the storage of a tensor of the host."""

    @property
    def device(self) -> torch.device:
        return CUDA

    def __repr__(self, **options: Any) -> str:
        return f"OnDevice({down(self)})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.ndim else repr(self)

    def record_stream(self, stream: "Stream") -> None:
        pass

    def tolist(self) -> Any:
        # torch's own refuses all but plain tensors; a GPU's is one copy to the host.
        return self.detach().cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Device(TorchDispatchMode):
    """While it is on, `device="cuda"` makes tensors of the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **(kwargs or {}))  # DTensor asks for shapes
        return dispatch(func, args, kwargs or {})


_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, OnDevice)


def up(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host as one of the device, in the same memory."""
    return torch.Tensor._make_subclass(OnDevice, tensor, dispatch_device=True, device_for_backend_keys=CUDA)


_DATA = torch._C.TensorBase.data


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, by which modules move: a tensor of the host becomes one of the device, or the reverse."""
    if isinstance(tensor, OnDevice) == isinstance(value, OnDevice):
        _DATA.__set__(tensor, value)
        return
    learns, new = tensor.requires_grad, value.detach()
    new._is_param = isinstance(tensor, torch.nn.Parameter)
    kept = vars(tensor)
    tensor.__class__, new.__class__ = type(new), type(tensor)
    tensor.__dict__, new.__dict__ = {**kept, **vars(new)}, {}
    torch._C._swap_tensor_impl(tensor, new)
    tensor.requires_grad_(learns)


def down(tensor: torch.Tensor) -> torch.Tensor:
    """The inverse. Made of the storage each time, for `tensor.data = other` changes that."""
    with torch._C._DisableTorchDispatch():
        storage, offset = tensor.untyped_storage(), tensor.storage_offset()
        return torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.size(), tensor.stride())


def _place() -> str:
    """Who of this project asked, and whether DeepSpeed did so in between."""
    root, frame, between = f"{SOURCE.parents[2]}{os.sep}", sys._getframe(), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}deepspeed{os.sep}" in name and "site-packages" in name:
            between = "DeepSpeed, "
        if name.startswith(f"{root}finetune") or (name.startswith(f"{root}tests") and name != __file__):
            line = linecache.getline(name, frame.f_lineno).strip()
            return f"{between}{name.removeprefix(root)}:{frame.f_lineno} {line}"
        frame = frame.f_back
    return "a library"


class _Pending:
    """Copies to the host that have not arrived."""

    def __init__(self) -> None:
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.arrived = 0

    def send(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies.append((target, source.clone()))
        target.fill_(float("nan") if target.is_floating_point() else 77)

    def arrive(self, number: int | None = None) -> None:
        """Those sent before the one of that number, all of them without."""
        count = len(self.copies) if number is None else max(0, number - self.arrived)
        now, self.copies = self.copies[:count], self.copies[count:]
        self.arrived += len(now)
        for target, source in now:
            target.copy_(source)

    def in_stream(self, source: torch.Tensor) -> torch.Tensor:
        """What a copy from pinned memory to the device finds there: it comes after those that are on their way."""
        place = source.untyped_storage().data_ptr()
        late = [(target, sent) for target, sent in self.copies if target.untyped_storage().data_ptr() == place]
        if not late:
            return source
        memory = source.untyped_storage().clone()

        def same(tensor: torch.Tensor) -> torch.Tensor:
            found = torch.empty(0, dtype=tensor.dtype)
            return found.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())

        for target, sent in late:
            same(target).copy_(sent)
        return same(source)

    @property
    def number(self) -> int:
        return self.arrived + len(self.copies)


PENDING = _Pending()


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation as a GPU has it."""
    if func is torch.ops.prim.device.default:
        return CUDA
    flat, spec = tree_flatten((args, kwargs))
    if any(isinstance(t, torch.Tensor) and type(t) not in _PLAIN for t in flat):
        return NotImplemented  # such as DTensor, which knows what lies within
    ours = [t for t in flat if isinstance(t, OnDevice)]
    device = kwargs.get("device")
    device = None if device is None else torch.device(device)
    if not ours and (device is None or device.type != "cuda"):
        return func(*args, **kwargs)
    name = func._schema.name
    SEEN.calls[name] += 1
    if name == "aten::_fused_sdp_choice":
        return 0  # the one without kernels of its own
    if name == "torch_attn::_varlen_attn":
        return _varlen(*args)
    if name == "torch_attn::_varlen_attn_backward":
        return _varlen_backward(*args)
    if name in ("aten::copy_", "aten::_to_copy"):
        return _copied(func, args, kwargs, device)
    if name in ("aten::set_", "aten::resize_"):
        raise RuntimeError(f"{name}: the fake device cannot follow storage that is exchanged")
    hosted = [t for t in flat if isinstance(t, torch.Tensor) and not isinstance(t, OnDevice) and t.ndim]
    if hosted and name in _INDEXED and isinstance(args[0], OnDevice):
        SEEN.copies.append(f"{name} by an index in host memory: {_place()}")
    elif hosted and ours and not name.startswith("c10d::"):
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {name} found tensors on cuda:0 and cpu "
            f"({_shapes(args)}): {_place()}"
        )
    if _waits(func, name, args):
        SEEN.reads.append(f"{name}: {_place()}")
        PENDING.arrive()
    known = {}
    for index, value in enumerate(flat):
        if isinstance(value, OnDevice):
            flat[index] = low = down(value)
            known[id(low)] = value
        elif isinstance(value, torch.device) and value.type == "cuda":
            flat[index] = CPU
    args, kwargs = tree_unflatten(flat, spec)
    if isinstance(kwargs.get("device"), str):
        kwargs["device"] = CPU
    found = func(*args, **kwargs)
    if torch.Tag.inplace_view in func.tags:
        low, high = args[0], known[id(args[0])]
        with torch._C._DisableTorchDispatch():
            high.data = up(low)
        return high
    if device is not None and device.type == "cpu":
        return found
    return tree_map_only(torch.Tensor, lambda t: known[id(t)] if id(t) in known else up(t), found)


def _varlen(query, key, value, cu_seqlens, cu_seqlens_k, longest, longest_k, causal, scale, *_):
    """Attention by document: the forward pass of flash attention's kernel, and what that refuses."""
    width = query.shape[2]
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.dtype == key.dtype == value.dtype
    assert width in range(8, 257, 8)
    assert width == key.shape[2] == value.shape[2]
    assert causal
    assert cu_seqlens is cu_seqlens_k
    assert cu_seqlens.dtype == torch.int32
    assert isinstance(cu_seqlens, OnDevice)
    found = torch.empty_like(down(query))
    for _q, _k, v, weights, at in _documents(query, key, value, cu_seqlens, scale):
        found[at] = torch.einsum("hij,jhe->ihe", weights, v).to(found.dtype)
    return up(found), up(torch.zeros(query.shape[1], query.shape[0])), up(torch.zeros(2, dtype=torch.uint64))


def _varlen_backward(gradient, query, key, value, out, lse, cu_seqlens, *rest):
    *_, scale, _ = rest
    found = [torch.zeros_like(down(t)) for t in (query, key, value)]
    for q, k, v, weights, at in _documents(query, key, value, cu_seqlens, scale):
        given = down(gradient)[at].float()
        scores = torch.einsum("ihe,jhe->hij", given, v)
        scores = weights * (scores - (scores * weights).sum(-1, keepdim=True)) * scale
        ours = torch.einsum("hij,jhe->ihe", scores, k), torch.einsum("hij,ihe->jhe", scores, q)
        for target, one in zip(found, (*ours, torch.einsum("hij,ihe->jhe", weights, given)), strict=True):
            # Several heads of queries may share one of keys and values.
            target[at] = one.view(len(one), target.shape[1], -1, one.shape[2]).sum(2).to(target.dtype)
    return tuple(map(up, found))


def _documents(query, key, value, cu_seqlens, scale):
    """Of each document queries, keys and values in fp32, a head each, the weights, and its place."""
    places = down(cu_seqlens).tolist()
    for begin, end in itertools.pairwise(places):
        at = slice(begin, end)
        q, k, v = (down(t)[at].float() for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        ahead = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        scores = torch.einsum("ihe,jhe->hij", q, k) * scale
        yield q, k, v, scores.masked_fill(ahead, -torch.inf).softmax(-1), at


def _shapes(args: Any) -> str:
    return ", ".join(f"{list(t.shape)} on {t.device}" for t in tree_flatten(args)[0] if isinstance(t, torch.Tensor))


def _waits(func: Any, name: str, args: Any) -> bool:
    """Whether the host needs a value of the device to go on."""
    if name in _INDEXED:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _copied(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device | None) -> Any:
    """A copy, within the device or from or to the host."""
    made = func._schema.name == "aten::_to_copy"
    source = args[0] if made else args[1]
    to_device = device is None or device.type == "cuda" if made else isinstance(args[0], OnDevice)
    from_device = isinstance(source, OnDevice)
    if made and device is None:
        to_device = from_device
    low = down(source) if from_device else source
    later = bool(kwargs.get("non_blocking", False) or (not made and len(args) > 2 and args[2]))
    if to_device and not from_device:
        pinned = source.is_pinned()
        low = PENDING.in_stream(source) if pinned else low
        if not (pinned and later):
            how = "blocking" if not later else "pageable"
            SEEN.copies.append(f"{how} copy of {list(source.shape)} to the device: {_place()}")
    if made:
        kept = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
        if to_device:
            kept.pop("pin_memory", None)
            return up(func(low, **kept, device=CPU))
        if not later:
            SEEN.reads.append(f"blocking copy of {list(source.shape)} to the host: {_place()}")
            PENDING.arrive()
            return func(low, **kept, device=CPU)
        target = torch.empty_like(low, dtype=kwargs.get("dtype") or low.dtype, pin_memory=True)
        PENDING.send(target, low)
        return target
    target = args[0]
    if to_device:
        down(target).copy_(low)
    elif not (later and target.is_pinned()):
        SEEN.reads.append(f"blocking copy of {list(source.shape)} to the host: {_place()}")
        PENDING.arrive()
        target.copy_(low)
    else:
        PENDING.send(target, low)
    return target


class Event:
    """`torch.cuda.Event`: waiting for it waits for the copies that were sent before it was recorded."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self._timed, self._at, self._number = enable_timing, 0.0, 0

    def record(self, stream: Any = None) -> None:
        self._at, self._number = time.perf_counter(), PENDING.number

    def query(self) -> bool:
        return PENDING.arrived >= self._number

    def synchronize(self) -> None:
        PENDING.arrive(self._number)

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end_event: "Event") -> float:
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._at and end_event._at):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return max(1e-6, 1000 * (end_event._at - self._at))


class Stream:
    """`torch.cuda.Stream`: all of them are one."""

    def __init__(self, device: Any = None, priority: int = 0, **options: Any) -> None:
        self.device, self.cuda_stream, self.stream_id, self.priority = CUDA, 0, 0, priority
        self.device_index, self.device_type = 0, 1

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return not PENDING.copies

    def synchronize(self) -> None:
        PENDING.arrive()


_ONE = Stream()
_PROPERTIES = SimpleNamespace(
    uuid="00000000-0000-0000-0000-000000000000",
    name=NAME,
    total_memory=80 * 2**30,
    major=9,
    minor=0,
    multi_processor_count=132,
    gcnArchName="",
)

# What is called of `torch.cuda`, and what it answers. Every other function fails as it does in torch's CPU build.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "manual_seed_all": lambda seed: None,
    "manual_seed": lambda seed: None,
    "synchronize": lambda device=None: PENDING.arrive(),
    "empty_cache": lambda: None,
    "mem_get_info": lambda device=None: (70 * 2**30, 80 * 2**30),
    "memory_allocated": lambda device=None: 2**30,
    "max_memory_allocated": lambda device=None: 2 * 2**30,
    "memory_reserved": lambda device=None: 3 * 2**30,
    "max_memory_reserved": lambda device=None: 4 * 2**30,
    "reset_peak_memory_stats": lambda device=None: None,
    "current_stream": lambda device=None: _ONE,
    "default_stream": lambda device=None: _ONE,
    # Asked by optimisers of torch's CUDA build.
    "is_current_stream_capturing": lambda: False,
    "stream": lambda stream: nullcontext(),
    "nvtx.range_push": lambda msg: 0,
    "nvtx.range_pop": lambda: 0,
    "Stream": Stream,
    "Event": Event,
}


def install(folder: Path) -> None:
    """Has this process take the device for present.

    Args:
        folder: For what is compiled, once.
    """
    ctypes.CDLL(str(built(folder)))
    for name, answer in _ANSWERS.items():
        *path, last = name.split(".")
        module = functools.reduce(getattr, path, torch.cuda)
        real = getattr(module, last)
        if isinstance(answer, type):
            assert all(hasattr(real, attribute) for attribute in vars(answer) if not attribute.startswith("__")), name
        else:
            answer = _taking_what(real, answer)
        setattr(module, last, answer)
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        # Imported by bitsandbytes where there is a device.
        torch._C._cuda_getCurrentRawStream = lambda device: 0
    torch.Tensor.data = property(_DATA.__get__, _set_data)
    # `torch.tensor(…, device="cuda")` makes a tensor of the host and sends it, as a GPU's does, before our eyes.
    torch._C._set_only_lift_cpu_tensors(True)
    start = torch.distributed.init_process_group

    @functools.wraps(start)
    def over_gloo(backend: str | None = None, *arguments: Any, **options: Any) -> None:
        options.pop("device_id", None)
        start("gloo", *arguments, **options)

    torch.distributed.init_process_group = over_gloo
    if "deepspeed.accelerator.real_accelerator" in sys.modules:
        # It may have chosen the CPU by now.
        sys.modules["deepspeed.accelerator.real_accelerator"].ds_accelerator = None
        os.environ.pop("DS_ACCELERATOR", None)
    Device().__enter__()


def _taking_what(real: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(real)

    @functools.wraps(real)
    def answered(*arguments: Any, **options: Any) -> Any:
        signature.bind(*arguments, **options)
        return answer(*arguments, **options)

    return answered


def built(folder: Path) -> Path:
    """The library, compiled if it is not there."""
    library = folder / "fake_cuda.so"
    if not library.exists():
        home = Path(torch.__file__).parent
        made = folder / f"{os.getpid()}.so"
        line = ["-std=c++20", "-shared", "-fPIC", f"-I{home}/include", str(SOURCE), "-o", str(made)]
        subprocess.run([COMPILER, *line, f"-L{home}/lib", "-lc10", "-ltorch_cpu"], check=True)
        made.replace(library)
    return library


@contextmanager
def watched() -> Iterator[Seen]:
    """What makes the host wait, meanwhile."""
    global SEEN
    before, SEEN = SEEN, Seen()
    try:
        yield SEEN
    finally:
        SEEN = before

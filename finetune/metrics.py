"""What a run says of itself: `metrics.jsonl` first, then a progress bar and trackers."""

import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from finetune import gpus
from finetune.backend import Backend
from finetune.files import Journal
from finetune.quantization import num_weights

# How configurations call the number of experts that a token goes through.
_EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts")


def peak_flops(device: torch.device, precision: str) -> float | None:
    """The device's peak rate in FLOP/s where it is known, else None."""
    if device.type != "cuda" or precision == "fp32":
        return None
    gpu = gpus.of_device(torch.cuda.get_device_name(device))
    return None if gpu is None else gpu.bf16_tflops * 1e12


def flops_per_target(network: nn.Module, sequence_length: int) -> float:
    """Training FLOPs a token: 6 a weight in a matrix product (4 if it is frozen), and attention's scores.

    Of a mixture's experts those count that a token goes through. A head's width is its own, which heads x width need
    not make the hidden size.

    Source: Kaplan et al. 2020, Chowdhery et al. 2022 (PaLM, appendix B): 6N + 12 layers x heads x width x T. Of the 6,
    2 are for the weight's own gradient.
    """
    config = getattr(network, "config", None)
    text = None if config is None else config.get_text_config()
    looked_up = {id(p) for m in network.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    # A tied embedding is also the head, and multiplied as such.
    head = getattr(network, "get_output_embeddings", lambda: None)()
    looked_up -= {id(p) for p in head.parameters()} if head is not None else set()
    shares = _shares_of_experts(network, text)
    products = sum(
        (6.0 if p.requires_grad else 4.0) * num_weights(p) * shares.get(id(p), 1.0)
        for name, p in network.named_parameters()
        # The frozen one beside a module that is trained whole, which runs in its place.
        if id(p) not in looked_up and ".original_module." not in name
    )
    return products + 6.0 * attention_width(text) * sequence_length


def _shares_of_experts(network: nn.Module, text: Any) -> dict[int, float]:
    """Of each weight that experts have, stacked or one by one, the share that a token goes through."""
    used = next((int(getattr(text, name)) for name in _EXPERTS_A_TOKEN if getattr(text, name, None)), 0)
    shares: dict[int, float] = {}
    for name, module in network.named_modules() if used else ():
        one_by_one = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] == "experts"
        count = len(module) if one_by_one else int(getattr(module, "num_experts", None) or 0)
        for p in module.parameters(recurse=one_by_one) if count else ():
            shape = getattr(p, "ds_shape", p.shape)
            if one_by_one or (len(shape) == 3 and shape[0] == count):
                shares[id(p)] = used / count
    return shares


def attention_width(text: Any) -> int:
    """Products of attention for each pair of tokens, over all layers: of queries with keys, and with values."""
    layers = layers_of(text)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(layers)
    width = 0
    for layer, kind in zip(layers, kinds, strict=False):
        heads = getattr(layer, "num_attention_heads", None)
        if isinstance(heads, int) and kind.endswith("attention") and not kind.startswith("linear"):
            keys = getattr(layer, "head_dim", None) or layer.hidden_size // heads
            # DeepSeek-V4's `head_dim` has its rotated part in it, and nothing says the rest.
            if apart := getattr(layer, "qk_nope_head_dim", None):
                keys = apart + layer.qk_rope_head_dim
            width += heads * (keys + (getattr(layer, "v_head_dim", None) or keys))
    return width


def layers_of(text: Any) -> list[Any]:
    """A configuration for each layer: Gemma 4's have heads of several widths, which cannot be read off the whole."""
    if getattr(text, "is_heterogeneous", False):
        return list(text.per_layer_config)
    return [text] * (getattr(text, "num_hidden_layers", None) or 0)


def peak_memory_gib(device: torch.device) -> float:
    """The most memory this process has held so far, in GiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stopwatch:
    """Splits time into named parts without making the host wait for the device.

    On a GPU, parts are measured between events, and read when the totals are asked for.
    """

    def __init__(self, device: torch.device, also: Callable[[str], None] = lambda name: None) -> None:
        """`also` is told of each mark."""
        self._cuda = device.type == "cuda"
        self._also = also
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """The time from here to the next mark belongs to `name`."""
        self._also(name)
        if self._cuda:
            event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._marks.append((name, event))
        else:
            self._marks.append((name, time.perf_counter()))

    def totals(self) -> dict[str, float]:
        """Seconds a name since the last call. Waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = {}
        for (name, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds = start.elapsed_time(end) / 1000 if self._cuda else end - start
            totals[name] = totals.get(name, 0.0) + seconds
        self._marks = self._marks[-1:]
        return totals


class Reporter:
    """Writes metrics on rank 0, and shows progress there: a bar on a terminal, a line for each log step elsewhere."""

    def __init__(self, backend: Backend, directory: Path, num_steps: int, *, text: bool, quiet: bool) -> None:
        """
        Args:
            text: Whether targets are tokens.
        """
        self._backend = backend
        self._main = backend.is_main
        self._quiet = quiet or not self._main
        self._num_steps = num_steps
        self._unit = "tok/s" if text else "targets/s"
        self._journal = Journal(directory / "metrics.jsonl")
        self.console = Console(stderr=True, highlight=False, quiet=self._quiet, soft_wrap=True)
        self._progress: Progress | None = None
        if self.console.is_terminal and not self._quiet and num_steps:
            self._progress = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._progress.add_task("training", total=num_steps, figures="")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if (reason := self._journal.close()) is not None:
            self.warn(f"Cannot write {reason}. Its last lines are lost.")

    def log(self, values: dict[str, Any]) -> None:
        """One line of `metrics.jsonl`, and the same to the trackers; rank 0 only. What is not finite becomes null."""
        if not self._main:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        if (reason := self._journal.write(finite)) is not None:
            self.warn(f"Cannot write {reason}. It is kept in memory, and tried again.")
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        if self._backend.accelerator.trackers:
            self._backend.accelerator.log(numbers, step=int(values["step"]))

    def step(self, step: int, values: dict[str, Any] | None) -> None:
        """Shows that a step is done; `values` on log steps."""
        if self._progress is not None:
            if values is not None:
                figures = f"loss {values['loss']:.4f}  {self._rate(values)}"
                self._progress.update(self._task, figures=figures)
            self._progress.update(self._task, completed=step)
        elif values is not None:
            figures = f"loss {values['loss']:.4f}  lr {values['lr']:.2e}  {self._rate(values)}"
            self.say(f"step {step}/{self._num_steps}  {figures}")

    def _rate(self, values: dict[str, Any]) -> str:
        rate = values["tokens_per_s"]
        return "compiling" if rate is None else f"{rate:,.0f} {self._unit}"

    def warn(self, text: str) -> None:
        """A line that people must see, on rank 0, also where they asked for errors only."""
        if self._main:
            warn(text)

    def say(self, text: str) -> None:
        """A line for people, on rank 0."""
        if not self._quiet:
            self.console.print(text, markup=False)
            sys.stderr.flush()


def warn(text: str) -> None:
    """A line that people must see, on whatever rank."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)
    sys.stderr.flush()

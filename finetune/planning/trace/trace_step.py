"""One step of a recipe under fake tensors: what is allocated, without allocating it.

A process of its own runs this, since backends change what libraries do:
`python -m finetune.planning.trace.trace_step JOB RESULT`.
"""

import json
import math
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed import fake_backend
from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.parameter_info import local, master_weights
from finetune.distributed.split_parameters import UNSPLIT, Splits
from finetune.distributed.state.weight_average import AVERAGE
from finetune.distributed.strategies import sequence
from finetune.models import activation_checkpointing, attention, chunked_loss, lora_adapters, split_layers
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.frozen_weights import multiply
from finetune.models.quantization import BLOCK, Linear8bit
from finetune.monitoring.nonfinite import spread_nonfinite
from finetune.optim.optimizers import build_optimizer
from finetune.planning import model_shapes
from finetune.tasks.task_lookup import find_task, head_of
from finetune.utils import atomic_files, json_files
from finetune.utils.compat import transformers_private
from finetune.utils.compat.torch_tracing_private import FakeTensorMode, MemoryKind, MemoryTracker, replace_functional
from finetune.utils.errors import RecipeError

# Of torch's own errors, the part that says something.
_LONGEST = 300


def main(job: Path, result: Path) -> None:
    """Takes the step that a file describes and writes what it took, or why it cannot be taken."""
    asked = json_files.read(job)
    recipe, launch = validate_recipe(asked["recipe"]), Launch(**asked["launch"])
    try:
        outcome = trace_step(recipe, launch, asked["stored"])
    except Exception as error:  # whatever a network's own code answers to tensors without values
        outcome = {"reason": reason_of(error), "traceback": traceback.format_exc()}
    atomic_files.write_text(result, json.dumps({**outcome, "cpu_s": time.process_time()}))


def reason_of(error: Exception) -> str:
    """Says in one line what cannot be traced: the operation, where it is known."""
    operation = getattr(error, "func", None)
    text = " ".join(str(error).split())
    where = next((f for f in reversed(traceback.extract_tb(error.__traceback__)) if "/torch/" not in f.filename), None)
    location = f" (in {Path(where.filename).name}, {where.name})" if where is not None else ""
    what = f"{operation} needs values" if operation is not None else text[:_LONGEST] or type(error).__name__
    return f"{what}{location}"


def trace_step(recipe: Recipe, launch: Launch, stored: str | None) -> dict[str, Any]:
    """Traces the second step of a run, or a later one: the optimiser has its state, and buckets are there.

    `stored` is the dtype of frozen weights as they are stored; None reads it off them.
    """
    task = find_task(recipe)
    backend = fake_backend.start_backend(recipe, launch)
    (network, splits), example = build_part(recipe, stored, backend), meta_batch(recipe)
    if recipe.model.attention not in ("sdpa", "eager") or "position_ids" not in example:
        transformers_private.assume_one_document_a_row()
    _dropout_as_on_gpus()
    tracker = MemoryTracker()
    with FakeTensorMode(), tracker:
        realise_tensors(network)
        caller = ForwardWrapper(network.train())
        caller.autocast = backend.autocast
        tracker.track_external(caller)
        model, optimizer = fake_backend.prepare_fakes(backend, caller, build_optimizer(caller, recipe), splits)
        # What a backend has made beside the weights: buckets that gradients land in.
        tracker.relabel(MemoryKind.ACT, MemoryKind.GRAD)
        inner = getattr(optimizer, "optimizer", optimizer)
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            parameter.grad = torch.empty_like(parameter)
        inner.step()
        if recipe.optim.ema_decay is not None:
            for parameter in master_weights(optimizer):
                inner.state[parameter][AVERAGE] = torch.empty_like(parameter.detach())
        optimizer.zero_grad()
        rows = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in example.items()}
        tracker.track_external(model, inner, *rows.values())
        rest = tracker.now()
        scale = torch.ones(task.num_weighted)
        if task.window is not None:
            rows["window_rows"] = torch.arange(recipe.batch.rows)
            with torch.no_grad():
                values = model(task.window, rows)
            rows["window"] = values.new_empty(recipe.batch.global_size, values.shape[1])
        # Gradients that stay are in their place after a step.
        for _ in range(2 if backend.strategy.keeps_gradients(backend) else 1):
            tracker.begin()
            backend.forward_backward(
                model,
                task.loss_sum,
                _rows(tracker, rows, backend.accumulation),
                lambda sums: spread_nonfinite(sums, scale),
            )
            gradients = tracker.now()["gradients"]
            backend.clip(model, recipe.optim.clip_norm)
            inner.step()
            backend.clear(optimizer)
    parts = tracker.peak
    gathered = parts["parameters"] - rest["parameters"]
    return {
        "moment": tracker.moment,
        "batch": tracker.batch,
        "parts": {**parts, "parameters": rest["parameters"], "gathered": gathered},
        "state": {
            "weights": rest["parameters"] + rest["buffers"],
            "gradients": gradients,
            "optimizer": sum(
                local(value).nbytes
                for state in inner.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.ndim
            ),
        },
    }


def build_part(recipe: Recipe, stored: str | None, backend: Backend) -> tuple[nn.Module, Splits]:
    """Builds the network that is trained, or this rank's part of it, without storage; and how it is split."""
    network, packed = model_shapes.build_skeleton(recipe, stored)
    known, head = lora_adapters.transformer(network), head_of(recipe)
    if head is not None and head.next_token and recipe.loss_by_head:
        chunked_loss.fuse_loss(known)
    group = backend.mesh.group("tp")
    splits = UNSPLIT if group is None else split_layers.split(network, group)
    sequence.install(network, backend.mesh.group("sp"))
    if known is not None and backend.mesh.group("sp") is not None:
        attention.assume_one_document()
        known.set_attn_implementation(attention.NAME)
    elif known is not None:
        # Flash attention's own kernels are for GPUs; torch's keeps as much, and one document as much as several.
        known.set_attn_implementation("eager" if recipe.model.attention == "eager" else "sdpa")
    replace_quantized(network, packed, recipe)
    if known is not None:
        activation_checkpointing.checkpoint_activations(known, recipe.model.gradient_checkpointing)
    return network, splits


class Packed4bit(nn.Linear):
    """Allocates what bitsandbytes' module does on a GPU, where a weight is read back in one step for each product.

    Source: bitsandbytes 0.50, `gemm_4bit` in `backends/cuda/ops.py` for more than 1,536 tokens (fewer may take a kernel
    that reads no whole weight); peft 0.21, `Linear4bit.forward` in `tuners/lora/bnb.py`, which copies the product.
    """

    adapted: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        product = multiply(input, self.weight, self.bias, self._read)
        return product.clone() if self.adapted else product

    def _read(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scales = weight.new_empty(math.ceil(self.out_features * self.in_features / BLOCK), dtype=torch.float32)
        whole = weight.new_empty((self.out_features, self.in_features), dtype=dtype)
        del scales  # there until the weight is
        return whole


def replace_quantized(network: nn.Module, modules: list[tuple[Any, torch.Size]], recipe: Recipe) -> None:
    """Puts stand-ins in the place of linear modules of a network on the meta device.

    They come with the shapes of their weights before layers were split over ranks.
    """
    layers: list[Any] = [m for m in network.modules() if hasattr(m, "lora_A") and hasattr(m, "get_base_layer")]
    adapted = {id(layer.get_base_layer()) for layer in layers}
    for module, whole in modules:
        shape = module.weight.shape
        scales = model_shapes.pack_linear(module, recipe, shape, part=shape != whole)
        if recipe.model.quantization == "int8":
            weight = module.weight
            del module.weight
            module.__class__ = Linear8bit
            module.packed = weight
            module.register_buffer("scale", torch.empty((shape[0], 1), device="meta"), persistent=False)
            continue
        # GPT-2's own class of linear module has its sides the other way round.
        sides = (module.nf, module.nx) if hasattr(module, "nx") else tuple(shape)
        module.__class__ = Packed4bit
        module.out_features, module.in_features = sides
        module.adapted = id(module) in adapted
        module.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"), persistent=False)


def realise_tensors(network: nn.Module) -> None:
    """Gives a network on the meta device tensors of the mode that is on."""
    made: dict[int, Any] = {}
    for module in network.modules():
        tables = (module.named_parameters, module.named_buffers)
        for name, tensor in [one for table in tables for one in table(recurse=False, remove_duplicate=False)]:
            if id(tensor) not in made:
                new: Any = torch.empty(tensor.shape, dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=tensor.requires_grad)
                if hasattr(tensor, "packed_weights"):
                    new.packed_weights = tensor.packed_weights
                made[id(tensor)] = new
            setattr(module, name, made[id(tensor)])


def _rows(tracker: MemoryTracker, rows: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Yields a step's micro-batches, all alike."""
    for _ in range(count):
        tracker.reset_mod_stats()  # of one forward pass
        yield rows


def meta_batch(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Returns a micro-batch on the meta device. For a custom task its data is made, for it may be of any shape."""
    task = find_task(recipe)
    if task.head is None or task.rows.shapes is None:
        train = task.build_data(recipe, True).train
        if train is None:
            raise RecipeError("the task has no training rows to take shapes from")
        return {
            name: value.to("meta") for name, value in train.batch(np.arange(recipe.batch.rows) % len(train)).items()
        }
    shapes = task.rows.shapes(recipe)
    return {name: torch.empty(shape, dtype=torch.long, device="meta") for name, shape in shapes.items()}


def _dropout_as_on_gpus() -> None:
    """Has dropout keep as little as on GPUs: nothing in attention, whose scores CPUs write out; else a byte a value."""
    attention = nn.functional.scaled_dot_product_attention

    def fused(*arguments: Any, dropout_p: float = 0.0, **options: Any) -> Any:
        return attention(*arguments, **options)

    def dropout(given: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        return torch.native_dropout(given, p, training)[0]

    replace_functional(scaled_dot_product_attention=fused, dropout=dropout)


if __name__ == "__main__":
    from finetune.utils.library_imports import silence_libraries

    silence_libraries()
    main(Path(sys.argv[1]), Path(sys.argv[2]))

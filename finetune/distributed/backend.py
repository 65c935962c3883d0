"""`Backend`: one process of a run, with the same methods whatever runs underneath.

The loop sees a `Backend`: it prepares a model, says the gradient norm, sums over ranks, and gathers weights.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from finetune.config.recipe_schema import Recipe
from finetune.distributed import (
    deepspeed_config,
    held_memory,
    init_accelerator,
    verify_launch,
    weight_digests,
)
from finetune.distributed.held_memory import Memory
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.mesh import Group, Mesh
from finetune.distributed.native_ops import native_ops
from finetune.distributed.resolve_config import ResolvedConfig
from finetune.distributed.state import state_transfer, tensor_shards
from finetune.distributed.state.tensor_shards import Shard, local
from finetune.distributed.strategies import tensor
from finetune.distributed.strategies.tensor import UNSPLIT, Splits
from finetune.distributed.verify_launch import RuntimeReport
from finetune.distributed.weight_digests import Held
from finetune.utils.compat import accelerate_private, torch_private
from finetune.utils.errors import BackendError


@dataclass
class Backend:
    """One process's view of where the run happens."""

    accelerator: Accelerator
    launch: Launch
    mesh: Mesh
    precision: str
    """What the network computes in: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    reduce_dtype: str = "fp32"
    """What gradients are summed over processes in: fp32 or bf16."""
    model: nn.Module | None = None
    """What `prepare` made of the model, and of the optimiser."""
    optimizer: Any = None
    splits: Splits = UNSPLIT
    """What of the network is split over the ranks of a tensor-parallel group; to be set before the optimiser is built
    and `prepare` is called."""
    num_weights: int = 0
    """Of the prepared model, each packed one counted."""
    num_trained: int = 0
    """Of these, those that are trained."""
    unverified: bool = True
    """Whether nobody has looked yet at the gradients of a micro-batch."""

    @classmethod
    def start(cls, recipe: Recipe, asked: Launch, settled: ResolvedConfig, *, quiet: bool = False) -> "Backend":
        """Starts the process group and the accelerator that the launch asks for.

        Raises:
            BackendError: If this machine cannot run it.
        """
        native_ops.ensure(native_ops.needed_ops(asked), quiet=quiet)
        accelerator = init_accelerator.start(asked, recipe, settled)
        if accelerator.num_processes != asked.num_processes:
            raise BackendError(
                f"{asked.file or 'The launch environment'} asks for {asked.num_processes} processes, but Accelerate "
                f"sees {accelerator.num_processes}: each would train alone and overwrite the others. Start it with "
                "`accelerate launch`, without `use_cpu` and without ACCELERATE_USE_CPU."
            )
        mesh = Mesh.of_launch(asked, accelerator.process_index, init_accelerator.TIMEOUT)
        return cls(accelerator, asked, mesh, settled.precision, settled.accumulation, recipe.optim.reduce_dtype)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def world(self) -> int:
        """Processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """This process's number among them."""
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def dtype(self) -> torch.dtype:
        """What matrix products are computed in."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.precision]

    @property
    def casts_weights(self) -> bool:
        """Whether the launch asks for the lighter way: the network's weights in 16 bit, all of them."""
        lighter = self.launch.uses_fsdp and self.launch.mixed_precision in ("bf16", "fp16")
        return lighter or self._casts_weights()

    def facts(self) -> dict[str, Any]:
        """What was asked for, for `run.json`: the launch, and DeepSpeed's config with every `auto` filled in."""
        asked = {key: value for key, value in asdict(self.launch).items() if key != "ds_config"}
        return {"launch": asked, "ds_config": getattr(self.accelerator, "deepspeed_config", None)}

    def loading(self, pretrained: bool) -> AbstractContextManager[None]:
        """The context to build the model in; see `init_accelerator.loading`."""
        return init_accelerator.loading(self.launch, pretrained)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Wraps model and optimiser for what was asked; weights are the same on every backend afterwards.

        Raises:
            BackendError: If the model has tensors without storage, or parameters went missing on the way.
        """
        if any(p.is_meta for p in model.parameters()):
            raise BackendError(
                "The model is on the meta device and has no weights to train. Materialise it first, as "
                "finetune.models.networks.init_weights does."
            )
        named = [(verify_launch.inner_name(name), p) for name, p in model.named_parameters()]
        sizes = [self.splits.size(name, p) for name, p in named]
        counted = [self._num_weights(name, p) for name, p in named]
        self.num_weights = sum(counted)
        self.num_trained = sum(size for size, (_, p) in zip(sizes, named, strict=True) if p.requires_grad)
        before = sum(len(group["params"]) for group in optimizer.param_groups)
        if self.launch.uses_deepspeed:
            ds_config = self.accelerator.deepspeed_plugin.deepspeed_config
            deepspeed_config.fit_to_model(
                ds_config, hidden_size=deepspeed_config.width_of(model), parameter_sizes=sizes
            )
            init_accelerator.match_shards(model)
            if self.launch.offload_params == "nvme":
                init_accelerator.shard_in_own_dtype(model, ds_config)
        if self.launch.kind == "ddp":
            # Constants such as rotary frequencies are the same everywhere; only what is learned beside weights is sent.
            kept = model.state_dict().keys()
            learned = any(name in kept for name, _ in model.named_buffers())
            self.accelerator.ddp_handler.broadcast_buffers = learned
        wrapped: Any
        if self.mesh.size("tp") > 1:
            wrapped, prepared = init_accelerator.prepare_beside_split_layers(
                self.accelerator, self.launch, self.mesh, model, optimizer
            )
        else:
            wrapped, prepared = self.accelerator.prepare(model, optimizer)
        names = {verify_launch.inner_name(name) for name, _ in wrapped.named_parameters()}
        if untied := sorted(names - {name for name, _ in named}):
            raise BackendError(
                f"{', '.join(untied)} had no tensor of its own, being tied to another, and has one that would not be "
                "trained once the model is wrapped. Nothing was trained. This is a fault of the installed accelerate "
                "(seen in 1.14); install 1.15 or newer."
            )
        if self.launch.kind == "zero3":
            init_accelerator.plan_gathers_by_training(wrapped)
        if self.launch.kind == "ddp" and self.reduce_dtype == "bf16":
            wrapped.register_comm_hook(wrapped.process_group, init_accelerator.sum_in_bf16)
        if self.launch.uses_fsdp:
            distinct = {id(p) for group in prepared.param_groups for p in group["params"]}
            if len(distinct) != before:
                raise BackendError(
                    f"The optimiser had {before} parameters and holds {len(distinct)} distinct ones after sharding: "
                    "some would never be trained. This is a fault of the installed accelerate; install a version that "
                    "was tested (`finetune doctor`)."
                )
            if self.launch.offload_optimizer != "none":
                torch_private.never_skip_steps(getattr(prepared, "optimizer", prepared))
            if self.launch.sync_each_batch:
                # Ranks may use different weights in a micro-batch (experts): what they reduce must match.
                wrapped.set_reduce_scatter_unused_params(True)
        self.model, self.optimizer = wrapped, prepared
        return wrapped, prepared

    def _num_weights(self, name: str, parameter: Any) -> int:
        """Weights that a whole parameter stands for."""
        split = self.splits.parameters.get(name)
        packed = getattr(parameter, "packed_weights", None) if split is None else split.packed
        return int(packed if packed is not None else self.splits.size(name, parameter))

    def verify(self, model: nn.Module, optimizer: Any, rehearse: Callable[[], torch.Tensor]) -> RuntimeReport:
        """Reads back what runs; see `verify_launch.verify`."""
        if self.launch.uses_deepspeed:
            whole = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
            verify_launch.check_shards(self.launch, self.accelerator.deepspeed_plugin.deepspeed_config, whole)
        report = verify_launch.verify(
            self.accelerator,
            self.launch,
            self.precision,
            model,
            optimizer,
            self.accumulation,
            self.splits,
            init_accelerator.REDUCED[self.reduce_dtype],
            rehearse,
        )
        return replace(report, num_parameters=self.num_weights, num_trained=self.num_trained)

    def memory(self, model: nn.Module, state_bytes: float) -> Memory:
        """What this rank holds from step to step; see `held_memory.measure`."""
        self._reshard()
        return held_memory.measure(self.launch, model, self.accumulation, state_bytes)

    def autocast(self) -> AbstractContextManager[Any]:
        """The context that the network computes in, inside the one that the wrapper provides.

        Sharded backends free weights after use, so casts of them must not be cached for the whole forward pass.
        """
        if not self.launch.sharded or self.precision == "fp32" or self._casts_weights():
            # Not a disabled autocast, which would switch off the wrapper's.
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype, cache_enabled=False)

    def _casts_weights(self) -> bool:
        """Whether DeepSpeed itself turns the network's weights into 16 bit, and autocast would get in its way."""
        if not self.launch.uses_deepspeed:
            return False
        config = self.accelerator.deepspeed_plugin.deepspeed_config
        return bool(config["bf16"]["enabled"] or config["fp16"]["enabled"])

    @contextmanager
    def micro_batch(self, model: Any, *, last: bool) -> Iterator[None]:
        """The context of the forward and backward pass of one of a step's micro-batches.

        Gradients are summed over ranks after the last one, or after each where the backend cuts them or is told to.

        Raises:
            BackendError: If gradients turn out to be held otherwise than was asked, or to be missing where that would
                not leave weights as they are; nothing has been trained then.
        """
        self.accelerator.sync_gradients = last
        with (
            verify_launch.check_all_used(self.launch, model, self.optimizer, holds=not last)
            if self.unverified
            else nullcontext()
        ):
            if last:
                yield
            elif self.launch.uses_fsdp and self.launch.sync_each_batch:
                # Between copies of a hybrid shard, sums still cross once a step.
                model.set_requires_all_reduce(False)
                yield
                model.set_requires_all_reduce(True)
            else:
                with self.accelerator.no_sync(model):
                    yield
        if self.unverified and self.launch.uses_fsdp and not last:
            held_memory.verify_gradients(self.launch, model)
        self.unverified = False

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass of one of a step's micro-batches, of which each is divided by their number."""
        if self.launch.uses_deepspeed or self.accelerator.scaler is not None:
            self.accelerator.backward(loss)
        else:
            # What Accelerate does, which looks for an optional package on the disk at each call.
            (loss / self.accumulation).backward()  # type: ignore[no-untyped-call]

    def clip(self, model: nn.Module, max_norm: float | None) -> torch.Tensor:
        """Clips the gradients and returns their global norm from before; DeepSpeed has clipped by then.

        Call it at the end of a window only, on every rank.
        """
        if self.launch.uses_deepspeed:
            # Not accelerator.clip_grad_norm_, which reads the value to the host at once.
            norm: Any = self.accelerator.deepspeed_engine_wrapped.engine.get_global_grad_norm()
        else:
            self.accelerator.unscale_gradients()
            norm = self._norm(model)
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        return torch.as_tensor(norm, dtype=torch.float32)

    def _norm(self, model: nn.Module) -> torch.Tensor:
        """The norm of all gradients over all ranks, a scalar in fp32."""
        gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        group = self.splits.group
        if group is None:
            return _total_square((gradient for _, gradient in gradients), self.device).sqrt().float()
        named = {verify_launch.inner_name(name): gradient for name, gradient in gradients}
        tensor.sum_partial([local(named[name]) for name in sorted(self.splits.partial & named.keys())], group)
        counted = (gradient for name, gradient in named.items() if tensor.counts_in_norm(self.splits, name))
        square = _total_square(counted, self.device)
        torch.distributed.all_reduce(square, group=group.handle)
        return square.sqrt().float()

    def step(self, optimizer: Any, norm: torch.Tensor) -> None:
        """The optimiser's step, unless the gradient norm is not finite: then nothing of it reaches the weights.

        DeepSpeed and loss scaling decide alike by themselves, the former in the backward pass.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        if self.launch.uses_deepspeed or self.accelerator.scaler is not None:
            optimizer.step()
        elif torch_private.skips_nonfinite_steps(inner) and not _makes_momenta(inner):
            # The kernel itself skips, as it does under loss scaling, so that the host need not wait.
            inner.grad_scale, inner.found_inf = None, (~norm.isfinite()).float()
            inner.step()
        elif bool(norm.isfinite()):
            inner.step()

    def clear(self, optimizer: Any) -> None:
        """Clears the gradients once the optimiser has stepped."""
        if self.keeps_gradients:
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay in place from step to step, as views of buckets that are there anyway.

        Made anew where micro-batches add up under DDP, they would be there twice until the last micro-batch.
        """
        return self.launch.kind == "ddp" and self.accumulation > 1

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, so that gradients may overflow now and then (fp16)."""
        return self.precision == "fp16"

    def steps_in_backward(self) -> bool:
        """Whether the backward pass that ends a window also runs the optimiser (DeepSpeed)."""
        return self.launch.uses_deepspeed

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; every rank must call it."""
        if self.world > 1:
            torch.distributed.all_reduce(values)
        return values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The largest over all ranks, in place; every rank must call it."""
        if self.world > 1:
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        return values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Rank 0's values, in place; every rank must call it."""
        if self.world > 1:
            torch.distributed.broadcast(values, src=0)
        return values

    def tell(self, value: Any) -> Any:
        """Rank 0's value, as JSON has it, on every rank; every rank must call it."""
        text = json.dumps(value).encode()
        size = int(self.broadcast(torch.tensor([len(text)], device=self.device)).item())
        content = torch.tensor(list(text) if self.is_main else [0] * size, dtype=torch.uint8, device=self.device)
        return json.loads(bytes(self.broadcast(content).tolist()))

    def read_state(self, network: nn.Module, optimizer: Any) -> Iterator[tuple[str, Shard]]:
        """This rank's shard of each trainable parameter and its optimiser state; see `state_transfer.read`.

        Raises:
            BackendError: If what ranks that share layers have in common is not the same on each of them.
        """
        self._reshard()
        if self.splits.group is not None:
            self._check_copies(network, self.splits.group)
        return state_transfer.read(self.launch, network, optimizer, self.splits)

    def _check_copies(self, network: nn.Module, group: Group) -> None:
        """Compares the bits of what each of the ranks that share layers has all of: nothing else shows a drift."""
        bits = torch.zeros(1, dtype=torch.int64, device=self.device)
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and name not in self.splits.parameters:
                bits += local(parameter.detach()).view(torch.int32).sum(dtype=torch.int64)
        most = torch.cat((bits, -bits))
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group.handle)
        if self.max((most.sum(0, keepdim=True) != 0).float()).item():
            raise BackendError(
                "Ranks that share layers (tp_size) have come to hold different values of what each has all of, such as "
                "norms and embeddings, so that the network is no longer one. Resume from the last checkpoint; if this "
                "happens again, look for hardware that computes wrongly."
            )

    def weight_digests(self, network: nn.Module) -> tuple[list[Held], torch.Tensor]:
        """The weights that this rank holds, and a number for the bits of each on each rank; see `weight_digests`.

        Every rank must call it; nothing is read from the device.
        """
        self._reshard()
        # One at a time: what rests on the disk lasts until the next one is asked for.
        found = [
            (held, weight_digests.digest_weight(tensor, self.device))
            for held, tensor in weight_digests.held_weights(
                self.launch, network, self.optimizer, self.splits, self.rank
            )
        ]
        return [held for held, _ in found], self.gather_numbers(torch.stack([number for _, number in found]))

    def gather_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Numbers of all ranks, one row a rank; every rank must call it."""
        if self.world == 1:
            return numbers[None]
        found = torch.empty(self.world, len(numbers), dtype=numbers.dtype, device=numbers.device)
        torch.distributed.all_gather(list(found.unbind()), numbers)
        return found

    def sizes(self, network: nn.Module) -> dict[str, int]:
        """Elements of each trainable parameter, whole, by name."""
        return state_transfer.sizes(network, self.splits)

    def read_rest(self, network: nn.Module) -> Iterator[tuple[str, Shard]]:
        """What a network has beside its trainable parameters, one at a time, as `read_state` gives it.

        Keys are `frozen/NAME` and, for buffers that belong to the weights, `buffer/NAME`.
        """
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                yield f"frozen/{name}", state_transfer.frozen(self.launch, name, parameter, self.splits)
        kept = network.state_dict().keys()
        for name, buffer in network.named_buffers():
            if name in kept:
                yield f"buffer/{name}", tensor_shards.undivided(buffer)

    def write_state(
        self, network: nn.Module, optimizer: Any, keys: Collection[str], load: Callable[[str], torch.Tensor]
    ) -> None:
        """The inverse, into a freshly prepared model and optimiser; see `state_transfer.write`."""
        self._reshard()
        state_transfer.write(self.launch, network, optimizer, keys, load, self.splits)

    def scaler_state(self) -> dict[str, float | int] | None:
        """The loss scale and how long it has held; None where the loss is not scaled."""
        return state_transfer.scaler_state(self.accelerator, self.launch)

    def set_scaler_state(self, saved: dict[str, float | int] | None) -> None:
        """The inverse of `scaler_state`."""
        state_transfer.set_scaler_state(self.accelerator, self.launch, saved)

    def _reshard(self) -> None:
        if self.launch.uses_fsdp and self.model is not None:
            state_transfer.reshard(self.model)

    def full_parameters(
        self, network: nn.Module, *, trained_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each parameter whole, one at a time: on rank 0 an fp32 (if trainable) CPU copy, elsewhere None.

        Every rank must run through it, in step.

        Args:
            network: The network inside the prepared model.
        """
        self._reshard()
        splits = self.splits
        trained = state_transfer.read(self.launch, network, self.optimizer, splits, parameters_only=True)
        others = () if trained_only else network.named_parameters()
        rest = (
            (name, state_transfer.frozen(self.launch, name, p, splits)) for name, p in others if not p.requires_grad
        )
        for key, piece in itertools.chain(trained, rest):
            whole = piece.gather()
            yield key.removeprefix(f"{state_transfer.PARAMETER}/"), whole.cpu().clone() if self.is_main else None

    def wait(self) -> None:
        """Returns once every rank has called it."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Ends the process group; leaving without it makes gloo's exit noisy."""
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    @staticmethod
    def forget() -> None:
        """Lets another run start in this process."""
        accelerate_private.reset_state()


@torch.no_grad()
def _total_square(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The sum of all gradients' squares over the ranks that shard them, a scalar in fp64; these must all call it."""
    here: dict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            summed = tuple(Partial() if place.is_shard() else place for place in gradient.placements)
            here[gradient.device_mesh, summed].append(gradient.to_local())
        else:
            here[()].append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for where, tensors in here.items():
        square = _square(tensors)
        total += (DTensor.from_local(square, *where).full_tensor() if where else square).to(device)
    return total


def _square(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The sum of all squares, in fp64.

    On CPUs torch 2.13 adds squares one after the other in fp32: of nine million values the norm is 3e-4 too small, and
    that of each rank's shards by another share. So it adds those of a row only.
    """
    if tensors[0].device.type != "cpu":
        return nn.utils.get_total_norm(tensors).double().square()
    rows = (torch.linalg.vector_norm(tensor, dim=-1) if tensor.ndim > 1 else tensor for tensor in tensors)
    return torch.stack([torch.linalg.vector_norm(row, dtype=torch.float64) for row in rows]).square().sum()


def _makes_momenta(optimizer: Any) -> bool:
    """Whether a step makes the momenta of torch's fused SGD, from memory as it is found: a skipped one leaves that.

    Source: torch 2.13, `torch/optim/sgd.py::_fused_sgd`.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    return any(group["momentum"] and not optimizer.state.get(group["params"][0]) for group in optimizer.param_groups)

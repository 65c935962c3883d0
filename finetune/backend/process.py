"""One process of a run, the same way whatever runs underneath.

The loop sees a `Backend`: it prepares a model, says the gradient norm, sums over ranks, and gathers weights.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from finetune.backend import deepspeed_config, forecast, memory, ops, pieces, prove, start, state
from finetune.backend.launch import Launch
from finetune.backend.memory import Memory
from finetune.backend.pieces import Piece
from finetune.backend.prove import Proof
from finetune.backend.settle import Settled
from finetune.errors import BackendError
from finetune.recipe import Recipe


@dataclass
class Backend:
    """One process's view of where the run happens."""

    accelerator: Accelerator
    launch: Launch
    precision: str
    """What the network computes in: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    reduce_dtype: str = "fp32"
    """What gradients are summed over processes in: fp32 or bf16."""
    model: nn.Module | None = None
    """What `prepare` made of the model, and of the optimiser."""
    optimizer: Any = None
    num_weights: int = 0
    """Of the prepared model, each packed one counted."""

    @classmethod
    def start(cls, recipe: Recipe, asked: Launch, settled: Settled, *, quiet: bool = False) -> "Backend":
        """Starts the process group and the accelerator that the launch asks for.

        Raises:
            BackendError: If this machine cannot run it.
        """
        ops.ensure(start.needed_ops(asked), quiet=quiet)
        accelerator = start.start(asked, recipe, settled)
        if accelerator.num_processes != asked.num_processes:
            raise BackendError(
                f"{asked.file or 'The launch environment'} asks for {asked.num_processes} processes, but Accelerate "
                f"sees {accelerator.num_processes}: each would train alone and overwrite the others. Start it with "
                "`accelerate launch`, without `use_cpu` and without ACCELERATE_USE_CPU."
            )
        return cls(accelerator, asked, settled.precision, settled.accumulation, recipe.optim.reduce_dtype)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def world(self) -> int:
        """Data-parallel processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
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
        """The context to build the model in; see `start.loading`."""
        return start.loading(self.launch, pretrained)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Wraps model and optimiser for what was asked; weights are the same on every backend afterwards.

        Raises:
            BackendError: If the model has tensors without storage, or parameters went missing on the way.
        """
        if any(p.is_meta for p in model.parameters()):
            raise BackendError(
                "The model is on the meta device and has no weights to train. Materialise it first, as "
                "finetune.models.materialise does."
            )
        if self.casts_weights and any(hasattr(p, "packed_weights") for p in model.parameters()):
            raise BackendError(
                f"{self.launch.ds_place or self.launch.file} asks for weights in 16 bit, and a cast would destroy "
                'those that model.quantization has packed. Remove mixed_precision (or "bf16") there: the '
                "recipe's precision already has products computed in 16 bit."
            )
        sizes = [getattr(p, "ds_numel", p.numel()) for p in model.parameters()]
        packed = [getattr(p, "packed_weights", None) for p in model.parameters()]
        self.num_weights = sum(size if inside is None else inside for size, inside in zip(sizes, packed, strict=True))
        before = sum(len(group["params"]) for group in optimizer.param_groups)
        if self.launch.uses_deepspeed:
            deepspeed_config.fit_to_model(
                self.accelerator.deepspeed_plugin.deepspeed_config,
                hidden_size=forecast.width_of(model),
                parameter_sizes=sizes,
                place=self.launch.ds_place,
            )
            start.match_shards(model)
            if self.launch.offload_params == "nvme":
                start.shard_in_own_dtype(model, self.accelerator.deepspeed_plugin.deepspeed_config)
        if self.launch.kind == "ddp":
            # Constants such as rotary frequencies are the same everywhere; only what is learned beside weights is sent.
            kept = model.state_dict().keys()
            learned = any(name in kept for name, _ in model.named_buffers())
            self.accelerator.ddp_handler.broadcast_buffers = learned
        wrapped, prepared = self.accelerator.prepare(model, optimizer)
        if self.launch.kind == "zero3":
            start.plan_gathers_by_training(wrapped)
        if self.launch.kind == "ddp" and self.reduce_dtype == "bf16":
            wrapped.register_comm_hook(None, start.sum_in_bf16)
        if self.launch.uses_fsdp:
            distinct = {id(p) for group in prepared.param_groups for p in group["params"]}
            if len(distinct) != before:
                raise BackendError(
                    f"The optimiser had {before} parameters and holds {len(distinct)} distinct ones after sharding: "
                    "some would never be trained. This is a fault of the installed accelerate; use the version of "
                    "constraints.txt."
                )
        self.model, self.optimizer = wrapped, prepared
        return wrapped, prepared

    def prove(self, model: nn.Module, optimizer: Any, rehearse: Callable[[], torch.Tensor]) -> Proof:
        """Reads back what runs; see `prove.prove`."""
        proof = prove.prove(
            self.accelerator,
            self.launch,
            self.precision,
            model,
            optimizer,
            self.accumulation,
            start.REDUCED[self.reduce_dtype],
            rehearse,
        )
        return replace(proof, num_parameters=self.num_weights)

    def memory(self, model: nn.Module, state_bytes: float) -> Memory:
        """What this rank holds from step to step; see `memory.measure`."""
        self._reshard()
        return memory.measure(self.launch, model, self.accumulation, state_bytes)

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
        elif self.launch.uses_fsdp or self.accelerator.scaler is not None:
            limit = float("inf") if max_norm is None else max_norm
            norm = self.accelerator.clip_grad_norm_(model.parameters(), limit)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            if max_norm is not None:
                nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return torch.as_tensor(norm, dtype=torch.float32)

    def step(self, optimizer: Any, norm: torch.Tensor) -> None:
        """The optimiser's step, unless the gradient norm is not finite: then nothing of it reaches the weights.

        DeepSpeed and loss scaling decide alike by themselves, the former in the backward pass.
        """
        inner = getattr(optimizer, "optimizer", optimizer)
        if self.launch.uses_deepspeed or self.accelerator.scaler is not None:
            optimizer.step()
        elif getattr(inner, "_step_supports_amp_scaling", False):
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

    def read_state(self, network: nn.Module, optimizer: Any) -> Iterator[tuple[str, Piece]]:
        """This rank's piece of every trainable parameter and its optimiser state, one at a time; see `state.read`."""
        self._reshard()
        return state.read(self.launch, network, optimizer)

    def sizes(self, network: nn.Module) -> dict[str, int]:
        """Elements of each trainable parameter, whole, by name."""
        return state.sizes(network)

    def read_rest(self, network: nn.Module) -> Iterator[tuple[str, Piece]]:
        """What a network has beside its trainable parameters, one at a time, as `read_state` gives it.

        Keys are `frozen/NAME` and, for buffers that belong to the weights, `buffer/NAME`.
        """
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                yield f"frozen/{name}", state.frozen(self.launch, parameter)
        kept = network.state_dict().keys()
        for name, buffer in network.named_buffers():
            if name in kept:
                yield f"buffer/{name}", pieces.undivided(buffer)

    def write_state(
        self, network: nn.Module, optimizer: Any, keys: Collection[str], load: Callable[[str], torch.Tensor]
    ) -> None:
        """The inverse, into a freshly prepared model and optimiser; see `state.write`."""
        self._reshard()
        state.write(self.launch, network, optimizer, keys, load)

    def scaler_state(self) -> dict[str, float | int] | None:
        """The loss scale and how long it has held; None where the loss is not scaled."""
        return state.scaler_state(self.accelerator, self.launch)

    def set_scaler_state(self, saved: dict[str, float | int] | None) -> None:
        """The inverse of `scaler_state`."""
        state.set_scaler_state(self.accelerator, self.launch, saved)

    def _reshard(self) -> None:
        if self.launch.uses_fsdp and self.model is not None:
            state.reshard(self.model)

    def full_parameters(
        self, network: nn.Module, *, trained_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Each parameter whole, one at a time: on rank 0 an fp32 (if trainable) CPU copy, elsewhere None.

        Every rank must run through it, in step.

        Args:
            network: The network inside the prepared model.
        """
        self._reshard()
        trained = state.read(self.launch, network, self.optimizer, parameters_only=True)
        others = () if trained_only else network.named_parameters()
        rest = ((name, state.frozen(self.launch, p)) for name, p in others if not p.requires_grad)
        for key, piece in itertools.chain(trained, rest):
            whole = piece.gather()
            yield key.removeprefix(f"{state.PARAMETER}/"), whole.cpu().clone() if self.is_main else None

    def wait(self) -> None:
        """Returns once every rank has called it."""
        self.accelerator.wait_for_everyone()

    def close(self) -> None:
        """Ends trackers and the process group; leaving without it makes gloo's exit noisy."""
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

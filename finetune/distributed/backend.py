"""`Backend`: one process of a run, with the same methods whatever runs underneath.

The loop sees a `Backend`: it prepares a model, says the gradient norm, sums over ranks, and gathers weights.
"""

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import patch_environment
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.distributed import memory_usage, native_ops, verify_launch, weight_digests
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.launch.network_interface import find_interface, interface_variables
from finetune.distributed.memory_usage import Memory
from finetune.distributed.mesh import Group, Mesh, gather_parts
from finetune.distributed.parameter_info import DTYPES, inner_name, local
from finetune.distributed.rendezvous_names import attempt_name
from finetune.distributed.split_parameters import UNSPLIT, Splits
from finetune.distributed.state import state_transfer, tensor_shards
from finetune.distributed.state.tensor_shards import Shard
from finetune.distributed.state.weight_average import averages_in_place
from finetune.distributed.strategies import tensor
from finetune.distributed.strategies.strategy import TIMEOUT, Strategy, strategy_of
from finetune.distributed.verify_launch import RuntimeReport
from finetune.distributed.weight_digests import Held
from finetune.utils import orphan_watch
from finetune.utils.compat import accelerate_private, torch_private
from finetune.utils.errors import BackendError


@dataclass
class Backend:
    """One process's view of where the run happens."""

    accelerator: Accelerator
    launch: Launch
    strategy: Strategy
    mesh: Mesh
    precision: str
    """Dtype that the network computes in: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    reduce_dtype: str = "fp32"
    """Dtype that gradients are summed over processes in: fp32 or bf16."""
    model: Any = None
    """The prepared model; the optimiser likewise."""
    optimizer: Any = None
    splits: Splits = UNSPLIT
    """Parameters of the network that are split over the ranks of a tensor-parallel group, as `prepare` was told."""
    num_weights: int = 0
    """Weights of the prepared model, each packed one counted."""
    num_trained: int = 0
    """Trained weights among them."""
    averages: bool = False
    """True if the optimiser's state has averages of the weights, which are evaluated and written in their place."""
    unverified: bool = True
    """True until the gradients of a first step have been checked."""

    @classmethod
    def start(cls, recipe: Recipe, asked: Launch, settled: ResolvedConfig, *, quiet: bool = False) -> "Backend":
        """Starts the process group and the accelerator that the launch asks for.

        Raises:
            BackendError: If this machine cannot run it.
        """
        native_ops.ensure_built(native_ops.needed_ops(asked), quiet=quiet)
        strategy, reduce_dtype = strategy_of(asked), recipe.optim.reduce_dtype
        accelerator = _start_accelerator(strategy, asked, settled, reduce_dtype)
        if accelerator.num_processes != asked.num_processes:
            raise BackendError(
                f"{asked.file or 'The launch environment'} asks for {asked.num_processes} processes, but Accelerate "
                f"sees {accelerator.num_processes}: each would train alone and overwrite the others. Start it with "
                "`accelerate launch`, without `use_cpu` and without ACCELERATE_USE_CPU."
            )
        mesh = Mesh.of_launch(asked, accelerator.process_index, accelerator.device.type, TIMEOUT)
        accumulation, averages = settled.accumulation, recipe.optim.averages
        return cls(accelerator, asked, strategy, mesh, settled.precision, accumulation, reduce_dtype, averages=averages)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.accelerator.device
        return device

    @property
    def world_size(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of matrix products."""
        return DTYPES[self.precision]

    def facts(self) -> dict[str, Any]:
        """Returns the request for `run.json`: the launch, and DeepSpeed's config with every `auto` filled in."""
        asked = asdict(self.launch)
        del asked["ds_config"]
        return {"launch": asked, "ds_config": getattr(self.accelerator, "deepspeed_config", None)}

    def loading(self, pretrained: bool) -> AbstractContextManager[None]:
        """Returns the context to build the network in: whole on every rank, or sharded as it loads."""
        return self.strategy.loading(self.launch, pretrained)

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, splits: Splits = UNSPLIT
    ) -> tuple[nn.Module, Any]:
        """Wraps model and optimiser for what was asked; weights are the same on every backend afterwards.

        Raises:
            BackendError: If the model has tensors without storage, or parameters went missing on the way.
        """
        if any(p.is_meta for p in model.parameters()):
            raise BackendError(
                "The model is on the meta device and has no weights to train. Materialise it first, as "
                "finetune.models.build_network.init_weights does."
            )
        self.splits = splits
        named = [(inner_name(name), p) for name, p in model.named_parameters()]
        self.num_trained = sum(splits.size(name, p) for name, p in named if p.requires_grad)
        self.num_weights = 0
        for name, parameter in named:
            split = splits.parameters.get(name)
            packed = getattr(parameter, "packed_weights", None) if split is None else split.packed
            self.num_weights += int(packed if packed is not None else splits.size(name, parameter))
        wrapped, prepared = self.strategy.prepare(self, model, optimizer)
        names = {inner_name(name) for name, _ in wrapped.named_parameters()}
        if untied := sorted(names - {name for name, _ in named}):
            raise BackendError(
                f"{', '.join(untied)} had no tensor of its own, being tied to another, and has one that would not be "
                "trained once the model is wrapped. Nothing was trained. This is a fault of the installed accelerate "
                "(seen in 1.14); install 1.15 or newer."
            )
        self.model, self.optimizer = wrapped, prepared
        return wrapped, prepared

    def hold_frozen(self, model: nn.Module) -> nn.Module:
        """Freezes a second network and holds it as the launch holds networks, to be called as the trained one is.

        Args:
            model: A `ForwardWrapper`; where the launch splits layers, they are split already.

        Raises:
            BackendError: If the launch cannot hold two, or this rank holds all of what is to be sharded.
        """
        held = self.strategy.hold(self, model.eval().requires_grad_(False))
        verify_launch.verify_frozen(self.launch, held)
        return held

    def verify(self, rehearse: Callable[[], torch.Tensor]) -> RuntimeReport:
        """Reads back what runs; see `verify_launch.verify_runtime`."""
        return verify_launch.verify_runtime(self, self.strategy, rehearse)

    def memory(self, model: nn.Module, state_bytes: float, frozen: Sequence[nn.Module] = ()) -> Memory:
        """Measures what this rank holds from step to step; see `memory_usage.measure_memory`."""
        for held in (model, *frozen):
            self.strategy.reshard(held)
        return memory_usage.measure_memory(self.strategy, self, model, state_bytes, frozen)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context that the network computes in, inside the one that the wrapper provides."""
        return self.strategy.autocast(self)

    def forward_backward(
        self,
        model: nn.Module,
        loss_sum: Callable[[nn.Module, Any], torch.Tensor],
        batches: Iterable[Any],
        scaled: Callable[[torch.Tensor], torch.Tensor],
    ) -> list[torch.Tensor]:
        """Runs the window of a step, its micro-batches, forward and backward; returns each one's summed loss.

        Gradients are reduced over ranks after the last micro-batch, or after each where the strategy shards them or is
        told to.

        Args:
            batches: As many as `accumulation`, each asked for when the one before has been computed.
            scaled: Makes of a micro-batch's summed loss what its gradients are taken of.

        Raises:
            BackendError: If gradients turn out to be held otherwise than was asked, or to be missing where that would
                not leave weights as they are; nothing has been trained then.
        """
        losses = []
        for index, batch in enumerate(batches):
            last = index == self.accumulation - 1
            self.accelerator.sync_gradients = last
            with (
                self.strategy.check_gradients(self, model, last) if self.unverified else nullcontext(),
                nullcontext() if last else self.strategy.no_sync(self, model),
            ):
                loss = self._forward(model, loss_sum, batch)
                self.strategy.backward(self, scaled(loss))
            self.unverified = False
            losses.append(loss.detach())
        self.strategy.reduce_gradients(self, model)
        tensor.reduce_partial(model, self.splits)
        return losses

    def share_buffers(self, network: nn.Module) -> None:
        """Gives all ranks the buffers of rank 0 that belong to the weights, as they are written: those of batch norms,
        which each rank has of its own rows except under DDP. Every rank must call it before it evaluates."""
        kept = network.state_dict().keys() if self.world_size > 1 else ()
        for name, buffer in network.named_buffers():
            if name in kept:
                buffer.copy_(self.broadcast(buffer.to(self.device, copy=True)))

    def evaluate_batches(self, model: nn.Module, function: Callable[..., Any], batches: Iterable[Any]) -> Iterator[Any]:
        """Yields `function(network, batch)` of each batch, inside the wrapper's forward pass; all ranks call it."""
        return (self._forward(model, function, batch) for batch in batches)

    def _forward(self, model: nn.Module, function: Callable[..., Any], batch: Any) -> Any:
        """Runs a function of the network inside the wrapper's forward pass.

        FSDP2 casts the floats of a module's inputs as it does its weights, those in dicts too. Beside tokens, floats
        are what losses are computed of (weights, a reference's scores, targets), and stay fp32.
        """
        uncast = isinstance(batch, dict) and "input_ids" in batch and self.strategy.casts_weights(self)
        return model(function, MappingProxyType(batch) if uncast else batch)

    def clip(self, model: nn.Module, max_norm: float | None) -> torch.Tensor:
        """Clips the gradients and returns their global norm from before.

        Call it at the end of a window only, on every rank.
        """
        norm = self.strategy.grad_norm(self, model)
        if max_norm is not None:
            self.strategy.clip_gradients(model, norm, max_norm)
        return norm

    def step(self, optimizer: Any, norm: torch.Tensor) -> None:
        """Steps the optimiser, unless the gradient norm is not finite: then nothing of it reaches the weights."""
        self.strategy.step(self, optimizer, norm)

    def clear(self, optimizer: Any) -> None:
        """Clears the gradients once the optimiser has stepped."""
        if self.strategy.keeps_gradients(self):
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()  # an optimiser of the user's need not know the argument

    def all_reduce_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over all ranks, in place; every rank must call it."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values)
        return values

    def all_reduce_max(self, values: torch.Tensor) -> torch.Tensor:
        """Takes the largest over all ranks, in place; every rank must call it."""
        if self.world_size > 1:
            torch.distributed.all_reduce(values, op=torch.distributed.ReduceOp.MAX)
        return values

    def broadcast(self, values: torch.Tensor) -> torch.Tensor:
        """Takes rank 0's values, in place; every rank must call it."""
        if self.world_size > 1:
            torch.distributed.broadcast(values, src=0)
        return values

    def broadcast_object(self, value: Any) -> Any:
        """Returns rank 0's value, as JSON has it; every rank must call it."""
        text = json.dumps(value).encode()
        size = int(self.broadcast(torch.tensor([len(text)], device=self.device)).item())
        content = torch.tensor(list(text) if self.is_main else [0] * size, dtype=torch.uint8, device=self.device)
        return json.loads(bytes(self.broadcast(content).tolist()))

    def read_state(self, network: nn.Module, optimizer: Any) -> Iterator[tuple[str, Shard]]:
        """Yields this rank's shards of trainable parameters and optimiser state; see `state_transfer.read_state`.

        Raises:
            BackendError: If what ranks that share layers have in common is not the same on each of them.
        """
        self._reshard()
        if self.splits.group is not None:
            self._check_copies(network, self.splits.group)
        return self.strategy.read_state(self, network, optimizer)

    def _check_copies(self, network: nn.Module, group: Group) -> None:
        """Compares the bits of parameters that all ranks sharing layers hold whole: nothing else shows a drift."""
        bits = torch.zeros(1, dtype=torch.int64, device=self.device)
        for name, parameter in network.named_parameters():
            if parameter.requires_grad and name not in self.splits.parameters:
                bits += weight_digests.digest_weight(local(parameter), self.device)
        most = torch.cat((bits, -bits))
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group.handle)
        if self.all_reduce_max((most.sum(0, keepdim=True) != 0).float()).item():
            raise BackendError(
                "Ranks that share layers (tp_size) have come to hold different values of what each has all of, such as "
                "norms and embeddings, so that the network is no longer one. Resume from the last checkpoint; if this "
                "happens again, look for hardware that computes wrongly."
            )

    def weight_digests(self, network: nn.Module) -> tuple[list[Held], torch.Tensor]:
        """Returns the weights that this rank holds, and a number for the bits of each on each rank.

        Every rank must call it; nothing is read from the device.
        """
        self._reshard()
        # One at a time: what rests on the disk lasts until the next one is asked for.
        digests = [
            (held, weight_digests.digest_weight(tensor, self.device))
            for held, tensor in weight_digests.held_weights(
                self.strategy.read_state(self, network, self.optimizer, parameters_only=True),
                network,
                self.splits,
                self.rank,
                copies=self.strategy.copies_masters(self.launch),
            )
        ]
        return [held for held, _ in digests], self.gather_numbers(torch.stack([number for _, number in digests]))

    def gather_numbers(self, numbers: torch.Tensor) -> torch.Tensor:
        """Gathers numbers of all ranks, one row a rank; every rank must call it."""
        if self.world_size == 1:
            return numbers[None]
        return torch.stack(gather_parts(numbers, Group(self.world_size, self.rank, None)))

    def sizes(self, network: nn.Module) -> dict[str, int]:
        """Returns the elements of each trainable parameter, whole, by name."""
        return state_transfer.parameter_sizes(network, self.splits)

    def read_rest(self, network: nn.Module) -> Iterator[tuple[str, Shard]]:
        """Yields what a network has beside its trainable parameters, one at a time, as `read_state` does.

        Keys are `frozen/NAME` and, for buffers that belong to the weights, `buffer/NAME`.
        """
        for name, parameter in network.named_parameters():
            if not parameter.requires_grad:
                yield f"frozen/{name}", self.strategy.read_frozen(self, name, parameter)
        kept = network.state_dict().keys()
        for name, buffer in network.named_buffers():
            if name in kept:
                yield f"buffer/{name}", tensor_shards.whole_shard(buffer)

    def write_state(
        self, network: nn.Module, optimizer: Any, keys: Collection[str], load: Callable[[str], torch.Tensor]
    ) -> None:
        """Writes what `read_state` gave into a freshly prepared model and optimiser."""
        self._reshard()
        self.strategy.write_state(self, network, optimizer, keys, load)

    def each_master(self, network: nn.Module, change: Callable[[Any, dict[str, Any]], None], changes: bool) -> None:
        """Calls `change` with each tensor that the optimiser steps; see `weight_average.EachMaster`."""
        self._reshard()
        self.strategy.each_master(network, self.optimizer, change, changes)

    def evaluated_weights(self, network: nn.Module) -> AbstractContextManager[None]:
        """Returns the context of evaluating and writing the network: it holds averages, if there are any.

        Every rank must enter it.
        """
        return averages_in_place(partial(self.each_master, network)) if self.averages else nullcontext()

    def scaler_state(self) -> dict[str, float | int] | None:
        """Returns the loss scale and how long it has held; None where the loss is not scaled."""
        return self.strategy.scaler_state(self.accelerator)

    def set_scaler_state(self, saved: dict[str, float | int] | None) -> None:
        """Takes up a `scaler_state` of any backend, if both sides scale losses."""
        if saved is not None and self.scaler_state() is not None:
            self.strategy.set_scaler_state(self.accelerator, saved)

    def _reshard(self) -> None:
        if self.model is not None:
            self.strategy.reshard(self.model)

    def full_parameters(
        self, network: nn.Module, *, trained_only: bool = False
    ) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields each parameter whole, one at a time: on rank 0 an fp32 (if trainable) CPU copy, elsewhere None.

        Every rank must run through it, in step. `network` is the one inside the prepared model.
        """
        self._reshard()
        trained = self.strategy.read_state(self, network, self.optimizer, parameters_only=True)
        others = () if trained_only else network.named_parameters()
        rest = ((name, self.strategy.read_frozen(self, name, p)) for name, p in others if not p.requires_grad)
        for key, piece in itertools.chain(trained, rest):
            whole = piece.gather()
            yield key.removeprefix(f"{state_transfer.PARAMETER}/"), whole.cpu().clone() if self.is_main else None

    def barrier(self) -> None:
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


def _start_accelerator(strategy: Strategy, launch: Launch, settled: ResolvedConfig, reduce_dtype: str) -> Accelerator:
    """Starts the process group too."""
    # Accelerate lets the variable win over its own argument; DeepSpeed's launcher always exports it.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    cpu = not torch.cuda.is_available()
    if cpu and launch.num_threads is not None:
        torch.set_num_threads(launch.num_threads)
    if orphan_watch.on_several_machines():
        # `finetune launch` has set them. To other launchers, gloo would take the address of this machine's own name,
        # which is often 127.0.1.1. Machines that meet there are one host, which needs no interface.
        with suppress(OSError, BackendError):
            os.environ.update(interface_variables(find_interface(os.environ["MASTER_ADDR"]), os.environ))
    torch_private.start_gloo_with_one_worker()
    # Ranks that `--max_restarts` has started again, and trials, leave their addresses under names of their own: the
    # launcher keeps the store of the attempt that failed, where in torch 2.13 they may find the address of a dead one.
    attempt = torch_private.prefixed_rendezvous(f"finetune/attempt-{attempt_name()}")
    # Accelerate doesn't see the section parallelism_config: FSDP2 is given the run's own mesh (`mesh.py`). Accelerate's
    # sequence parallelism runs under DeepSpeed alone; its tensor parallelism imports a name that transformers 5.23
    # no longer has.
    with attempt, patch_environment(accelerate_use_parallelism_config=False):
        options = strategy.accelerator_options(launch, settled, DTYPES[reduce_dtype], cpu)
        accelerator = Accelerator(
            gradient_accumulation_steps=settled.accumulation, dataloader_config=DataLoaderConfiguration(), **options
        )
    if not cpu:
        # fp32 means fp32. Accelerate may turn TF32 on for matrix products; for convolutions torch itself does.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return accelerator

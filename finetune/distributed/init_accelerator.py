"""Builds the `Accelerator` for what the launch asks, on GPUs with NCCL and on machines without one with gloo."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, DataLoaderConfiguration

from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig
from finetune.distributed.rendezvous_store import attempt_name
from finetune.distributed.strategies.strategy import REDUCED, Strategy
from finetune.utils.compat import torch_private


def start_accelerator(strategy: Strategy, launch: Launch, recipe: Recipe, settled: ResolvedConfig) -> Accelerator:
    """Starts the process group and the `Accelerator`."""
    # Accelerate lets the variable win over its own argument; DeepSpeed's launcher always exports it.
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
    cpu = not torch.cuda.is_available()
    if cpu and launch.num_threads is not None:
        torch.set_num_threads(launch.num_threads)
    torch_private.start_gloo_with_one_worker()
    # Ranks that `--max_restarts` has started again, and trials, leave their addresses under names of their own: the
    # launcher keeps the store of the attempt that failed, where in torch 2.13 they may find the address of a dead one.
    attempt = torch_private.prefixed_rendezvous(f"finetune/attempt-{attempt_name()}")
    with attempt, _without_parallelism():
        options = strategy.accelerator_options(launch, settled, REDUCED[recipe.optim.reduce_dtype], cpu)
        accelerator = Accelerator(
            gradient_accumulation_steps=settled.accumulation, dataloader_config=DataLoaderConfiguration(), **options
        )
    if not cpu:
        # fp32 means fp32. Accelerate may turn TF32 on for matrix products; for convolutions torch itself does.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    return accelerator


@contextmanager
def _without_parallelism() -> Iterator[None]:
    """Keeps the section parallelism_config from Accelerate: FSDP2 is given the run's own mesh (`mesh.py`).

    Accelerate's sequence parallelism is DeepSpeed's and runs under DeepSpeed alone; its tensor parallelism imports a
    name that transformers 5.23 no longer has.
    """
    flag = "ACCELERATE_USE_PARALLELISM_CONFIG"
    before = os.environ.pop(flag, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[flag] = before

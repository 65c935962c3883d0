"""Checks a recipe against a launch before anything is read or started, and says what the run would do."""

import copy
import os
from collections.abc import Mapping

from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch import network_interface
from finetune.distributed.launch.launch_config import Launch, ResolvedConfig, read_launch
from finetune.distributed.launch.predicted_environment import PredictedEnvironment
from finetune.distributed.parameter_info import width_of
from finetune.distributed.resolve_config import resolve_config
from finetune.distributed.strategies.strategy import strategy_of
from finetune.models import float8, lora_adapters, split_layers
from finetune.models.build_network import build_meta_model, settle_parameters
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.monitoring.alerts import check_alert
from finetune.optim import lr_schedule
from finetune.optim.optimizers import build_optimizer, check_optimizer
from finetune.planning.model_shapes import with_vocabulary_size
from finetune.tasks.metrics import check_metrics
from finetune.tasks.task_lookup import check_task_splits, find_task
from finetune.utils.errors import RecipeError


def check_run(recipe: Recipe, launch: Launch, env: Mapping[str, str] = os.environ) -> ResolvedConfig:
    """Returns what follows from recipe and launch, which a run, a dry run and `finetune doctor` refuse alike.

    Args:
        env: A worker's environment.

    Raises:
        FinetuneError: If they contradict each other, or this machine cannot run what is asked.
    """
    config = resolve_config(recipe, launch, env)
    if launch.num_processes > 1:
        network_interface.check_named(env)
    check_task_splits(recipe, launch)
    check_metrics(recipe.eval.metrics)
    check_optimizer(recipe.optim, launch)
    float8.check_fp8(recipe)
    check_alert(recipe.guard, env)
    task = find_task(recipe)
    if task.head is not None and task.build_config is not None:
        # Before data is read: sizes of which there is no network, however many classes the data has.
        classes = recipe.task if recipe.task.num_labels else recipe.task.model_copy(update={"num_labels": 2})
        plain = recipe.model_copy(update={"lora": None, "task": classes})
        build_meta_model(copy.deepcopy(task.build_config(plain, None)), task.head, plain)
    return config


def describe(recipe: Recipe, foreseen: PredictedEnvironment | None = None) -> str:
    """Resolves and checks a recipe against a launch, builds its network without storage, says the plan.

    Args:
        foreseen: The launch; this process's own if left out.

    Raises:
        FinetuneError: With what is wrong.
    """
    launch = foreseen.launch if foreseen else read_launch()
    config = check_run(recipe, launch, foreseen.env if foreseen else os.environ)
    task = find_task(recipe)
    if task.build_skeleton is None:
        raise RecipeError(
            f"task '{recipe.task.name}' has no build_skeleton, which a dry run needs to count its network."
        )
    network = settle_parameters(task.build_skeleton(with_vocabulary_size(recipe), None))
    if launch.tensor > 1:
        split_layers.divide(network, loss_by_head=False).check(launch.tensor)
    sizes = [parameter.numel() for parameter in network.parameters()]
    strategy_of(launch).check_network(launch, config.ds_config, width_of(network), sizes)
    kind = type(lora_adapters.transformer(network) or network).__name__
    build_optimizer(ForwardWrapper(network), recipe)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    length = {key: value for key, value in recipe.length.model_dump().items() if value is not None}
    batch, data, world = recipe.batch, recipe.data, launch.data_ranks
    sources = [s.path or s.hub or f"built-in sample of {s.sample}" for s in data.train or data.validation]
    rate = f"peak rate {lr_schedule.peak_lr(recipe):.3g}, {recipe.schedule.name} schedule"
    split = f"{batch.global_size} rows = {world} x {config.micro_size} x {config.accumulation}"
    if batch.micro_size not in ("auto", config.micro_size):
        split += f"; batch.micro_size {batch.micro_size} is {config.micro_size} here, the largest up to it that divides"
    if batch.micro_size == "auto":
        split = f"{batch.global_size} rows = {world} x auto, which is tried when the run starts"
    lines = {
        "task": recipe.task.name,
        "network": f"{kind}, {sum(sizes):,} parameters, {trained:,} trained, in {config.precision}",
        "weights": recipe.model.name or f"random, seed {recipe.seed}",
        "adapters": lora_adapters.describe_adapters(network),
        "backend": f"{launch.kind} on {launch.num_processes} process(es)"
        + (f", from {launch.file}" if launch.file else ""),
        "data": f"{', '.join(sources) or 'its own'}; {data.packing} rows of {data.sequence_length} tokens",
        "batch": "evaluation only" if recipe.length.steps == 0 else split,
        "length": ", ".join(f"{value} {key}" for key, value in length.items()),
        "optimiser": f"{recipe.optim.name}, {rate}",
        "output": recipe.output.dir,
    }
    width = max(map(len, lines))
    return "\n".join(f"{key:<{width}}  {value}" for key, value in lines.items() if value is not None)

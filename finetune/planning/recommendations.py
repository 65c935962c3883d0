"""The simplest launch file that fits, and what it changes of the recipe."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import yaml

from finetune.config.recipe import divisors
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.resolve_config import micro_rows
from finetune.planning.activation_memory import StepSetting
from finetune.planning.launch_candidates import Candidate
from finetune.planning.model_shapes import KINDS

Make = Callable[[str, str, StepSetting], Candidate]
"""A candidate, of a launch file's name, a way to train and a setting."""


@dataclass(frozen=True)
class Advice:
    """The launch to take."""

    candidate: Candidate | None
    changes: tuple[str, ...]
    """To the recipe, as they are written on the command line."""
    reason: str


def recipe_changes(candidate: Candidate, recipe: Recipe) -> tuple[str, ...]:
    """Returns a candidate's changes to a recipe, as `key=value`."""
    changes = []
    if candidate.setting.checkpointed != (recipe.model.gradient_checkpointing is True):
        changes.append(f"model.gradient_checkpointing={str(candidate.setting.checkpointed).lower()}")
    if candidate.setting.micro != micro_rows(recipe, candidate.launch.data_ranks):
        changes.append(f"batch.micro_size={candidate.setting.micro}")
    lora, packed = recipe.lora is not None, recipe.model.quantization
    if candidate.kind == "full" and lora:
        changes.append("lora=null")
    if candidate.kind != "full" and not lora:
        changes.append("lora.rank=16")
        if recipe.model.fp8:
            changes.append("model.fp8=false")
    if (candidate.kind == "QLoRA") != (packed is not None):
        changes.append("model.quantization=" + ("nf4" if candidate.kind == "QLoRA" else "null"))
    return tuple(changes)


def offered_settings(recipe: Recipe) -> Iterator[StepSetting]:
    """Yields the recipe's own setting and smaller ones, the cheapest change first; a launch takes what divides."""
    micro, checkpointed = recipe.batch.rows, recipe.model.gradient_checkpointing is True
    smaller = [size for size in reversed(divisors(recipe.batch.global_size)) if size < micro]
    for sizes in ([micro], smaller):
        for again in dict.fromkeys((checkpointed, True)):
            yield from (StepSetting(size, again) for size in sizes)


def recommend_launch(recipe: Recipe, kind: str, launches: dict[str, Launch], make: Make) -> Advice:
    """Returns the simplest launch that fits: shard rather than recompute, recompute rather than offload."""
    near = [n for n, launch in launches.items() if launch.offload_params == launch.offload_optimizer == "none"]
    far = [name for name in launches if name not in near]
    settings, others = [*offered_settings(recipe)], KINDS[KINDS.index(kind) + 1 :]
    tries = [(name, kind, setting) for names in (near, far) for setting in settings for name in names]
    tries += [(name, other, setting) for other in others for name in launches for setting in settings]
    for name, way, setting in tries:
        candidate = make(name, way, setting)
        if candidate.verdict == "fits":
            instead = "" if way == kind else f"nothing fits as the recipe is; with {way}: "
            return Advice(candidate, recipe_changes(candidate, recipe), instead + reason_for(candidate.launch))
    tried = [make(*each) for each in tries]
    if all(candidate.verdict == "refused" for candidate in tried):
        return Advice(None, (), f"nothing can be launched. {tried[0].reason}")
    left = "Take more devices, or ones with more memory, or a larger tp_size; pipeline parallelism is not offered here"
    return Advice(None, (), f"nothing fits. {left}.")


# From the simplest to the slowest, each with the reason to take it where all before it do not fit.
_REASONS = {
    "single": "one process: nothing to move between ranks",
    "ddp": "the simplest for several processes: each holds the whole network, and gradients are averaged",
    "zero1": "only the optimiser state is sharded: as much traffic as DDP",
    "zero2": "gradients and optimiser state are sharded, weights stay whole",
    "fsdp_grad_op": "gradients and optimiser state are sharded, weights stay gathered from forward to backward",
    "hsdp": "all is sharded within groups, which hold copies: layers are gathered over the fast links",
    "fsdp": "all is sharded, and layers are gathered for use",
    "zero3": "all is sharded, and layers are gathered for use",
    "sp": "rows are split over ranks, which exchange them around attention: a rank holds a part of the activations",
    "fsdp_sp": "all is sharded, and rows are split over ranks: a rank holds a part of the activations",
    "tp": "layers are split over ranks, which sum their results: a rank holds a part of weights and activations",
    "fsdp_tp": "layers are split over ranks, and each part is sharded over the others",
    "fsdp_tp_sp": "layers and rows are split over ranks, and all is sharded: the least on each without host memory",
    "optimizer_offload": "optimiser state rests in host memory, where the optimiser steps; weights stay on the device",
    "fsdp_offload": "shards rest in host memory",
    "zero3_offload": "shards rest in host memory, where the optimiser steps",
    "zero3_nvme": "shards rest on disk: slow, and the last way on these devices",
}


def plain_name(launch: Launch) -> str:
    """Returns the name of the shipped file that does the same on one machine."""
    name = launch.kind
    if launch.tensor > 1:
        name += "_tp"
    if launch.sequence > 1:
        name += "_sp"
    if not launch.reshard:
        name += "_grad_op"
    if launch.offload_params == "none" != launch.offload_optimizer:
        return "optimizer_offload"
    name += {"none": "", "cpu": "_offload", "nvme": "_nvme"}[launch.offload_params]
    return name.removeprefix("ddp_")


def preference_of(launch: Launch, nodes: int) -> int:
    """Returns its place in the order, from 0; on one machine, full shards come before copies of them."""
    position = [*_REASONS].index(plain_name(launch)) if plain_name(launch) in _REASONS else len(_REASONS)
    return position * 2 + (5 if nodes == 1 and launch.replicate > 1 else 0)


def reason_for(launch: Launch) -> str:
    """Returns why to take it."""
    return _REASONS.get(plain_name(launch), "a custom launch file")


def launch_text(launch: Launch, nodes: int) -> str:
    """Returns a launch file's text for the launch's processes on so many machines."""
    source = Path(str(launch.file))
    text = source.read_text(encoding="utf-8")
    text = _set(text, "num_processes", str(launch.num_processes))
    text = _set(text, "num_machines", str(nodes))
    if launch.replicate > 1:
        text = _set(text, "parallelism_config_dp_replicate_size", str(launch.replicate))
        text = _set(text, "parallelism_config_dp_shard_size", str(launch.num_processes // launch.replicate))
    if launch.ds_place and not Path(yaml.safe_load(text)["deepspeed_config"]["deepspeed_config_file"]).is_file():
        # It would not be found from where the file is written.
        text = _set(text, "deepspeed_config_file", str(Path(launch.ds_place).absolute()))
    if nodes > 1 and "machine_rank" not in text:
        if launch.ds_place:
            text = text.rstrip() + "\n  deepspeed_multinode_launcher: standard\n"
        text = text.rstrip() + (
            "\n# The first machine's address, and a port that is free on it.\nmain_process_ip: 127.0.0.1\n"
            "main_process_port: 29500\nmachine_rank: 0\nrdzv_backend: static\nsame_network: true\n"
        )
    # What the shipped file says of its own use, up to its first key, need not hold for this one.
    keys = dropwhile(lambda line: line.startswith("#"), text.splitlines(keepends=True))
    return f"# {launch.num_processes} processes on {nodes} machine(s), after {source.name}.\n{''.join(keys)}"


def _set(text: str, key: str, value: str) -> str:
    return re.sub(rf"(?m)^(\s*{key}): .*$", lambda m: f"{m.group(1)}: {value}", text)

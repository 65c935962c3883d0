"""The cheapest change that makes a candidate fit, and the simplest launch file that fits."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.config.recipe import divisors
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.planning.launch_candidates import Candidate, Setting
from finetune.planning.model_shapes import KINDS, Variant
from finetune.utils.errors import BackendError

NOTHING = "nothing offered"
"""In place of a change that makes a candidate fit."""

Make = Callable[[str, str, Setting], Candidate]
"""A candidate, of a launch file's name, a way to train and a setting."""


@dataclass(frozen=True)
class Advice:
    """What to launch."""

    candidate: Candidate | None
    """None if nothing fits."""
    changes: tuple[str, ...]
    """To the recipe, as they are written on the command line."""
    reason: str


def changes(candidate: Candidate, recipe: Recipe) -> tuple[str, ...]:
    """What a candidate changes of a recipe, as `key=value`."""
    found = []
    if candidate.setting.checkpointed != (recipe.model.gradient_checkpointing is True):
        found.append(f"model.gradient_checkpointing={str(candidate.setting.checkpointed).lower()}")
    if candidate.setting.micro != recipe.batch.rows:
        found.append(f"batch.micro_size={candidate.setting.micro}")
    lora, packed = recipe.lora is not None, recipe.model.quantization
    if candidate.kind == "full" and lora:
        found.append("lora=null")
    if candidate.kind != "full" and not lora:
        found.append("lora.rank=16")
        if recipe.model.fp8:
            found.append("model.fp8=false")
    if (candidate.kind == "QLoRA") != (packed is not None):
        found.append("model.quantization=" + ("nf4" if candidate.kind == "QLoRA" else "null"))
    return tuple(found)


def settings(recipe: Recipe, ranks: int) -> Iterator[Setting]:
    """The recipe's own setting and what makes it smaller, the cheapest change first."""
    micro, checkpointed = recipe.batch.rows, recipe.model.gradient_checkpointing is True
    share = recipe.batch.global_size // ranks if recipe.batch.global_size % ranks == 0 else 0
    smaller = [size for size in sorted(divisors(share), reverse=True) if size < micro] if share else []
    if smaller and share % micro:
        micro, *smaller = smaller
    yield Setting(micro, checkpointed)
    if not checkpointed:
        yield Setting(micro, True)
    for size in smaller:
        yield Setting(size, checkpointed)
    if not checkpointed:
        yield from (Setting(size, True) for size in smaller)


def cheapest(
    candidate: Candidate, recipe: Recipe, names: Sequence[str], variants: dict[str, Variant | str], make: Make
) -> str:
    """The cheapest change that makes a candidate fit: to the recipe, else to the next launch file, else to the way."""
    offered = list(settings(recipe, candidate.launch.data_ranks))
    tries = [(candidate.name, candidate.kind, setting) for setting in offered]
    for name in names[names.index(candidate.name) + 1 :]:
        tries += [(name, candidate.kind, setting) for setting in offered]
    for kind in KINDS[KINDS.index(candidate.kind) + 1 :]:
        if not isinstance(variants[kind], str):
            tries += [(candidate.name, kind, setting) for setting in offered]
    for name, kind, setting in tries:
        if make(name, kind, setting).verdict == "fits":
            more = changes(make(candidate.name, candidate.kind, setting), recipe)
            if kind != candidate.kind:
                return " ".join([kind, *more])
            more = tuple(change for change in more if change not in changes(candidate, recipe))
            return " ".join(more if name == candidate.name else [name, *more])
    return NOTHING


def recommend(recipe: Recipe, kind: str, launches: dict[str, Launch], make: Make) -> Advice:
    """The simplest launch that fits: cut rather than recompute, recompute rather than rest in host memory."""
    near = [name for name, launch in launches.items() if launch.offload_params == "none"]
    far = [name for name in launches if name not in near]
    tries = []
    for names in (near, far):
        ranks = max((launches[name].num_processes for name in names), default=1)
        tries += [(name, kind, setting) for setting in settings(recipe, ranks) for name in names]
    for other in KINDS[KINDS.index(kind) + 1 :]:
        for name, launch in launches.items():
            tries += [(name, other, setting) for setting in settings(recipe, launch.num_processes)]
    for name, way, setting in tries:
        candidate = make(name, way, setting)
        if candidate.verdict == "fits":
            instead = "" if way == kind else f"nothing fits as the recipe is; with {way}: "
            return Advice(candidate, changes(candidate, recipe), instead + reason(candidate.launch))
    tried = [make(*each) for each in tries]
    if all(candidate.verdict == "refused" for candidate in tried):
        return Advice(None, (), f"nothing can be launched. {tried[0].reason}")
    return Advice(None, (), f"nothing fits. {NONE_LEFT}.")


# From the simplest to the slowest, each with the reason to take it where all before it do not fit.
_ORDER = (
    ("single", "one process: nothing to move between ranks"),
    ("ddp", "the simplest that uses every GPU: all is whole on each, gradients are averaged"),
    ("zero1", "only the optimiser is cut: as much traffic as DDP"),
    ("zero2", "gradients and optimiser are cut, weights stay whole"),
    ("fsdp_grad_op", "gradients and optimiser are cut, weights stay gathered from forward to backward"),
    ("hsdp", "cut within groups only, copies between them: layers are gathered over the fast links"),
    ("fsdp", "all is cut, and layers are gathered for use"),
    ("zero3", "all is cut, and layers are gathered for use"),
    ("sp", "rows are split over ranks, which exchange them around attention: a rank holds a part of the activations"),
    ("fsdp_sp", "all is cut, and rows are split over ranks: a rank holds a part of the activations"),
    ("tp", "each layer is split over ranks, which sum what they find: a rank holds a part of weights and activations"),
    ("fsdp_tp", "each layer is split over ranks, and what each has of it is cut over the others"),
    ("fsdp_tp_sp", "layers and rows are split over ranks, and all is cut: the least on each without host memory"),
    ("fsdp_offload", "what is cut rests in host memory"),
    ("zero3_offload", "what is cut rests in host memory, where the optimiser steps"),
    ("zero3_nvme", "what is cut rests on disk: slow, and the last way on these GPUs"),
)
NONE_LEFT = "Take more or larger GPUs, or a larger tp_size; pipeline parallelism is not offered here"


def plain_name(launch: Launch) -> str:
    """The shipped file that does the same on one machine."""
    if launch.sequence * launch.tensor > 1:
        split = ("_tp" if launch.tensor > 1 else "") + ("_sp" if launch.sequence > 1 else "")
        return split.removeprefix("_") if launch.kind == "ddp" else launch.kind + split
    if launch.kind == "fsdp" and not launch.reshard:
        return "fsdp_grad_op"
    if launch.offload_params == "nvme":
        return f"{launch.kind}_nvme"
    return launch.kind + ("_offload" if launch.offload_params != "none" else "")


def preference(launch: Launch, nodes: int) -> int:
    """Its place in the order, 0 for what to take first. On one machine, full shards come before hybrid ones."""
    names = [name for name, _ in _ORDER]
    place = names.index(plain_name(launch)) if plain_name(launch) in names else len(names)
    return place * 2 + (5 if nodes == 1 and launch.kind == "hsdp" else 0)


def reason(launch: Launch) -> str:
    """Why to take it."""
    return dict(_ORDER).get(plain_name(launch), "a custom launch file")


def files(folder: Path, gpus: int, nodes: int) -> dict[str, Path]:
    """The launch files in a folder that make sense on so many GPUs of so many machines, by name.

    Raises:
        BackendError: If there are none.
    """
    found = {file.stem: file for file in sorted(folder.glob("*.yaml"))}
    if not found:
        raise BackendError(
            f"There are no launch files in {folder}. Start from a checkout, or name a folder: "
            "--configs accelerate_configs."
        )
    for name in [n for n in found if n.endswith("_2nodes")]:
        place = found.pop(name)
        if nodes > 1:
            found[name.removesuffix("_2nodes")] = place
    ranks = gpus * nodes
    sole = {"single", "zero3_offload", "zero3_nvme"}
    return {n: f for n, f in found.items() if (ranks > 1 and n != "single") or (ranks == 1 and n in sole)}


def written(launch: Launch, nodes: int) -> str:
    """A launch file's text for the launch's processes on so many machines."""
    source = Path(str(launch.file))
    text = source.read_text(encoding="utf-8")
    text = _set(text, "num_processes", str(launch.num_processes))
    text = _set(text, "num_machines", str(nodes))
    if launch.replicate > 1:
        text = _set(text, "parallelism_config_dp_replicate_size", str(launch.replicate))
        text = _set(text, "parallelism_config_dp_shard_size", str(launch.num_processes // launch.replicate))
    if launch.ds_place and not Path(_get(text, "deepspeed_config_file")).is_file():
        # It would not be found from where the file is written.
        text = _set(text, "deepspeed_config_file", str(Path(launch.ds_place).absolute()))
    if nodes > 1 and "machine_rank" not in text:
        if launch.uses_deepspeed:
            text = text.rstrip() + "\n  deepspeed_multinode_launcher: standard\n"
        text = text.rstrip() + (
            "\n# The first machine's address, and a port that is free on it.\nmain_process_ip: 127.0.0.1\n"
            "main_process_port: 29500\nmachine_rank: 0\nrdzv_backend: static\nsame_network: true\n"
        )
    # What the shipped file says of its own use, up to its first key, need not hold for this one.
    return f"# {launch.num_processes} processes on {nodes} machine(s), after {source.name}.\n{_without_head(text)}"


def _without_head(text: str) -> str:
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[first:]) + "\n"


def _get(text: str, key: str) -> str:
    found = re.search(rf"(?m)^\s*{key}: *(.*?) *$", text)
    return found.group(1) if found else ""


def _set(text: str, key: str, value: str) -> str:
    return re.sub(rf"(?m)^(\s*{key}): .*$", lambda m: f"{m.group(1)}: {value}", text)

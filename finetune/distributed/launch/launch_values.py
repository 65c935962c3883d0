"""Where every value of the launch config comes from, for `finetune explain`."""

from collections.abc import Iterable, Mapping
from typing import Any

from finetune.config.provenance import Setting, Value, flat, places
from finetune.config.recipe_schema import Recipe
from finetune.distributed import deepspeed_config
from finetune.distributed.device_selection import Devices
from finetune.distributed.launch import launch_key_docs
from finetune.distributed.launch.launch_environment import LaunchEnvironment
from finetune.distributed.launch.launch_file import groups, place_of
from finetune.distributed.resolve_config import ResolvedConfig
from finetune.utils import platforms

_HANDED_ON = "Handed on to Accelerate; this toolkit does not look at it."


def values(
    recipe: Recipe, foreseen: LaunchEnvironment, settled: ResolvedConfig, here: Devices, env: Mapping[str, str]
) -> list[Value]:
    """Every value of the launch plane.

    Args:
        env: The launcher's environment.
    """
    return [
        *_launch_file(foreseen, env),
        *_ds_config(foreseen, settled),
        *_derived(recipe, foreseen, settled, here, env),
        *_environment(foreseen, env),
    ]


def precision(settled: ResolvedConfig, here: Devices) -> Setting:
    """What became of the recipe's `precision: auto`."""
    place = f"this machine has {here.gpus} GPU(s)" if here.gpus else "this machine has no GPU that torch can use"
    return Setting("derived", place, settled.precision)


def _launch_file(foreseen: LaunchEnvironment, env: Mapping[str, str]) -> Iterable[Value]:
    file, written = foreseen.launch.file, foreseen.written
    if file is None:
        return
    known, lines = groups(written["distributed_type"], written), places(file)
    for name in [*known, *(name for name in written if name not in known)]:
        key = known.get(name) or launch_key_docs.KNOWN.get(name) or launch_key_docs.Key(_HANDED_ON)
        settings = [] if key.default is None else [Setting("default", "Accelerate", key.default)]
        variable = key.variable or ""
        from_env = [Setting("environment", variable, env[variable])] if variable in env else []
        if variable in foreseen.exported:  # else the variable is what workers hear
            settings, from_env = [*settings, *from_env], []
        if name in written:
            settings.append(Setting("launch file", place_of(name, file, lines), written[name]))
            if launch_key_docs.DEAF in key.meaning:
                settings.append(Setting("default", "Accelerate does not take it from the file", key.default))
        elif variable in foreseen.exported and variable in env:
            settings.append(Setting("default", "accelerate launch exports it", foreseen.exported[variable]))
        settings += from_env
        if name in foreseen.options:
            settings.append(Setting("command line", f"--{name}", foreseen.options[name]))
        if settings:
            yield Value(name, "launch file", tuple(settings), key.meaning, key.unit)


def _ds_config(foreseen: LaunchEnvironment, settled: ResolvedConfig) -> Iterable[Value]:
    written, place = flat(foreseen.launch.ds_config), foreseen.launch.ds_place
    lines = places(place) if place else {}
    for key, value in flat(settled.ds_config).items():
        settings = []
        if key in written:
            settings.append(Setting("ds_config", place_of(key, place, lines), written[key]))
        if key not in written or written[key] != value:
            source = deepspeed_config.DECIDES.get(key)
            why = f"the recipe's {source}" if source else "the same on every backend"
            settings.append(Setting("derived", why, value))
        meaning, unit = launch_key_docs.DS_CONFIG.get(key, ("A value of DeepSpeed's own: see its documentation.", ""))
        yield Value(key, "ds_config", tuple(settings), meaning, unit)


def _derived(
    recipe: Recipe, foreseen: LaunchEnvironment, settled: ResolvedConfig, here: Devices, env: Mapping[str, str]
) -> Iterable[Value]:
    asked, batch = foreseen.launch, recipe.batch

    def row(key: str, *settings: Setting) -> Value:
        return Value(key, "derived", settings, *launch_key_docs.DERIVED[key])

    yield row("backend", Setting("derived", asked.file or "no launch file: one process", asked.kind))
    split = f"{batch.global_size} / ({batch.micro_size} x {asked.data_ranks})"
    why = "nothing is trained" if recipe.length.steps == 0 else split
    found = "auto" if batch.micro_size == "auto" else settled.accumulation
    yield row("accumulation", Setting("derived", why, found))
    if here.gpus:
        return
    if asked.num_threads is None:
        yield row("num_threads", Setting("environment", "OMP_NUM_THREADS", env["OMP_NUM_THREADS"]))
    else:
        cores = platforms.cores()
        yield row("num_threads", Setting("derived", f"{cores} cores / {foreseen.local}", asked.num_threads))


def _environment(foreseen: LaunchEnvironment, env: Mapping[str, str]) -> Iterable[Value]:
    """Variables that are set and act on a run, but for those that stand beside a key of the launch file."""
    shown = {key.variable for key in groups(foreseen.written.get("distributed_type", "NO"), foreseen.written).values()}
    for name in sorted(set(env) - shown if foreseen.launch.file else set(env)):
        prefixed: Any = (text for prefix, text in launch_key_docs.PREFIXES.items() if name.startswith(prefix))
        meaning = launch_key_docs.VARIABLES.get(name) or next(prefixed, None)
        if meaning is None:
            continue
        settings = [Setting("environment", "", env[name])]
        if name in foreseen.exported:
            settings.append(Setting("launch file", foreseen.launch.file or "", foreseen.exported[name]))
        yield Value(name, "environment", tuple(settings), meaning)

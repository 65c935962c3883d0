"""Finds the origin of every value of the launch config, for `finetune explain`."""

from collections.abc import Iterable, Mapping

from finetune.config.provenance import Setting, Value, flat, place_of, places
from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch import deepspeed_file
from finetune.distributed.launch.launch_config import ResolvedConfig
from finetune.distributed.launch.launch_file import key_lines
from finetune.distributed.launch.launch_schema import NOT_FROM_FILE, fields_of
from finetune.distributed.launch.predicted_environment import PredictedEnvironment
from finetune.distributed.strategies import deepspeed_config
from finetune.utils import platforms

# What follows from both planes, or from this machine.
_DERIVED = {
    "backend": ("What runs: single, ddp, fsdp, hsdp, zero1, zero2 or zero3.", ""),
    "accumulation": (
        "Micro-batches that each process adds up for an optimiser step: batch.global_size / (micro-batch x data "
        "ranks), with the largest micro-batch up to batch.micro_size that divides. A data rank is a process, or a "
        "group of sp_size x tp_size processes that read the same rows.",
        "micro-batches",
    ),
    "num_threads": ("CPU threads of each process: cores / processes, unless OMP_NUM_THREADS says.", "threads"),
}

# Variables that act on a run besides keys.
_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "The GPUs that processes see.",
    "OMP_NUM_THREADS": "CPU threads of each process.",
    "TORCH_EXTENSIONS_DIR": "Where native ops are kept once they are compiled.",
    "DS_ACCELERATOR": "The device that DeepSpeed takes.",
    "HF_HOME": "Where the hub's models, data sets and tokens are kept.",
    "HF_HUB_CACHE": "Where the hub's models are kept.",
    "HF_ENDPOINT": "The model hub's address.",
    "HF_HUB_OFFLINE": "If 1, nothing is asked of the model hub: its cache must have it all.",
    "GLOO_SOCKET_IFNAME": "The network interface that gloo uses.",
    "PYTORCH_CUDA_ALLOC_CONF": "How torch allocates GPU memory.",
}
PREFIXES = {
    "NCCL_": "A setting of NCCL, by which GPUs talk to each other.",
    "ACCELERATE_": "A setting of Accelerate.",
    "FSDP_": "A setting of Accelerate for FSDP.",
    "PARALLELISM_CONFIG_": "A setting of Accelerate on how processes are laid out.",
}


def launch_settings(
    recipe: Recipe, foreseen: PredictedEnvironment, settled: ResolvedConfig, gpus: int, env: Mapping[str, str]
) -> list[Value]:
    """Returns every value of the launch plane; `env` is the launcher's environment."""
    return [
        *_launch_file(foreseen, env),
        *_ds_config(foreseen, settled),
        *_derived(recipe, foreseen, settled, gpus, env),
        *_environment(foreseen, env),
    ]


def resolved_precision(settled: ResolvedConfig, gpus: int) -> Setting:
    """Returns the precision that the recipe's `precision: auto` comes to."""
    reason = f"this machine has {gpus} GPU(s)" if gpus else "this machine has no GPU that torch can use"
    return Setting("derived", reason, settled.precision)


def _launch_file(foreseen: PredictedEnvironment, env: Mapping[str, str]) -> Iterable[Value]:
    file, written = foreseen.launch.file, foreseen.written
    if file is None:
        return
    lines = key_lines(file)
    for name, key in fields_of(foreseen.asked.sections()).items():
        settings = [] if key.get_default() is None else [Setting("default", "Accelerate", key.default)]
        variable = key.serialization_alias or ""
        from_env = [Setting("environment", variable, env[variable])] if variable in env else []
        if variable in foreseen.exported:  # else the variable is what workers hear
            settings, from_env = [*settings, *from_env], []
        unit = next((text for text in key.metadata if isinstance(text, str)), "")
        meaning = " ".join((key.description or "").split())
        if name in NOT_FROM_FILE:
            meaning += " Accelerate takes it from its own command line, and not from the file."
        if name in written:
            settings.append(Setting("launch file", place_of(name, file, lines), written[name]))
            if name in NOT_FROM_FILE:
                settings.append(Setting("default", "Accelerate does not take it from the file", key.default))
        elif variable in foreseen.exported and variable in env:
            settings.append(Setting("default", "accelerate launch exports it", foreseen.exported[variable]))
        settings += from_env
        if name in foreseen.options:
            settings.append(Setting("command line", f"--{name}", foreseen.options[name]))
        if settings:
            yield Value(name, "launch file", tuple(settings), meaning, unit)


def _ds_config(foreseen: PredictedEnvironment, settled: ResolvedConfig) -> Iterable[Value]:
    written, ds_path = flat(foreseen.launch.ds_config), foreseen.launch.ds_place
    lines = places(ds_path) if ds_path else {}
    for key, value in flat(settled.ds_config).items():
        settings = []
        if key in written:
            settings.append(Setting("ds_config", place_of(key, ds_path, lines), written[key]))
        if key not in written or written[key] != value:
            source = deepspeed_config.DECIDES.get(key)
            why = f"the recipe's {source}" if source else "the same on every backend"
            settings.append(Setting("derived", why, value))
        meaning, unit = deepspeed_file.MEANINGS.get(key, ("A value of DeepSpeed's own: see its documentation.", ""))
        yield Value(key, "ds_config", tuple(settings), meaning, unit)


def _derived(
    recipe: Recipe, foreseen: PredictedEnvironment, settled: ResolvedConfig, gpus: int, env: Mapping[str, str]
) -> Iterable[Value]:
    asked, batch = foreseen.launch, recipe.batch
    split = f"{batch.global_size} / ({settled.micro_size} x {asked.data_ranks})"
    why = "nothing is trained" if recipe.length.steps == 0 else split
    accumulation = "auto" if batch.micro_size == "auto" else settled.accumulation
    settings = {
        "backend": Setting("derived", asked.file or "no launch file: one process", asked.kind),
        "accumulation": Setting("derived", why, accumulation),
    }
    if not gpus and asked.num_threads is None:
        settings["num_threads"] = Setting("environment", "OMP_NUM_THREADS", env["OMP_NUM_THREADS"])
    elif not gpus:
        share = f"{platforms.cores()} cores / {foreseen.local}"
        settings["num_threads"] = Setting("derived", share, asked.num_threads)
    return [Value(key, "derived", (setting,), *_DERIVED[key]) for key, setting in settings.items()]


def _environment(foreseen: PredictedEnvironment, env: Mapping[str, str]) -> Iterable[Value]:
    """Yields variables that are set and act on a run, but for those that stand beside a key of the launch file."""
    shown = {key.serialization_alias for key in fields_of(foreseen.asked.sections()).values()}
    for name in sorted(set(env) - shown if foreseen.launch.file else set(env)):
        prefixed = (text for prefix, text in PREFIXES.items() if name.startswith(prefix))
        if (meaning := _VARIABLES.get(name, next(prefixed, None))) is None:
            continue
        settings = [Setting("environment", "", env[name])]
        if name in foreseen.exported:
            settings.append(Setting("launch file", foreseen.launch.file or "", foreseen.exported[name]))
        yield Value(name, "environment", tuple(settings), meaning)

"""The keys that Accelerate and DeepSpeed know, read from their sources, to find misspelt ones.

The sources are parsed and not imported: importing either loads torch, and what is misspelt is refused before that.
"""

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from finetune.config.recipe import hint

# A section's keys; None where what is below a key is not looked at.
Known = Mapping[str, "Known | None"]

# What DeepSpeed reads of its config without a model of its own. Source: deepspeed 0.19, `runtime/config.py`; a test
# has DeepSpeed read a config and compares.
_WITHOUT_MODEL: dict[str, Known | None] = {
    **dict.fromkeys(
        (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "managed_gradient_accumulation",
            "gradient_clipping",
            "gradient_allreduce_op",
            "gradient_predivide_factor",
            "prescale_gradients",
            "communication_data_type",
            "seq_parallel_communication_data_type",
            "disable_allgather",
            "steps_per_print",
            "wall_clock_breakdown",
            "memory_breakdown",
            "dump_state",
            "log_level",
            "disable_python_gc",
            "dataloader_drop_last",
            "vocabulary_size",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
            "use_data_before_expert_parallelism",
            "autotuning",
            "data_efficiency",
            "datastates_ckpt",
            "expert_parallel",
            "hybrid_engine",
            "pipeline",
            "tensor_parallel",
            "weight_quantization",
        )
    ),
    "optimizer": dict.fromkeys(("type", "params", "legacy_fusion")),
    "scheduler": dict.fromkeys(("type", "params")),
    "torch_autocast": dict.fromkeys(("enabled", "dtype", "lower_precision_safe_modules")),
    "data_types": dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")),
    "activation_checkpointing": dict.fromkeys(
        (
            "partition_activations",
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        )
    ),
    "flops_profiler": dict.fromkeys(
        (
            "enabled",
            "recompute_fwd_factor",
            "profile_step",
            "module_depth",
            "top_modules",
            "detailed",
            "output_file",
        )
    ),
    "aio": dict.fromkeys(
        ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
    ),
    "checkpoint": dict.fromkeys(
        (
            "tag_validation",
            "checkpoint_serialization",
            "writer",
            "load_universal",
            "use_node_local_storage",
            "parallel_write",
        )
    ),
}

# The sections of which DeepSpeed has a model: the file below its package, and the class.
MODELS = {
    "zero_optimization": ("runtime/zero/config.py", "DeepSpeedZeroConfig"),
    "bf16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "bfloat16": ("runtime/precision_config.py", "DeepSpeedBF16Config"),
    "fp16": ("runtime/precision_config.py", "DeepSpeedFP16Config"),
    "comms_logger": ("comm/config.py", "CommsLoggerConfig"),
    "compile": ("compile/config.py", "CompileConfig"),
    "tensorboard": ("monitor/config.py", "TensorBoardConfig"),
    "wandb": ("monitor/config.py", "WandbConfig"),
    "csv_monitor": ("monitor/config.py", "CSVConfig"),
    "comet": ("monitor/config.py", "CometConfig"),
}


def unknown(tree: Mapping[str, Any], known: Known, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The keys of a tree that are not known, dotted, each with what is wrong."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            near = hint(str(name), list(known))
            yield key, f"unknown key{near or ' (allowed: ' + ', '.join(known) + ')'}"
            continue
        below = known[name]
        if below is not None and isinstance(value, Mapping):
            yield from unknown(value, below, f"{key}.")


@cache
def accelerate_options() -> tuple[str, ...]:
    """The options of `accelerate launch`, which are the keys of a launch file's sections."""
    calls = (node for node in ast.walk(_parsed("accelerate", "commands/launch.py")) if isinstance(node, ast.Call))
    named = (node.args for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument")
    words = (word.value for words in named for word in words if isinstance(word, ast.Constant))
    return tuple(word.removeprefix("--") for word in words if isinstance(word, str) and word.startswith("--"))


@cache
def deepspeed() -> Known:
    """The keys of a DeepSpeed config."""
    return {
        **_WITHOUT_MODEL,
        **{name: _fields(file, model) for name, (file, model) in MODELS.items()},
        "timers": {"throughput": _fields("utils/config.py", "DeepSpeedThroughputTimerConfig")},
    }


@cache
def deepspeed_aliases() -> dict[str, str]:
    """The other names that DeepSpeed has for keys of `zero_optimization`, and the name that its documentation uses."""
    file, name = MODELS["zero_optimization"]
    model = next(n for n in _parsed("deepspeed", file).body if isinstance(n, ast.ClassDef) and n.name == name)
    return {
        node.target.id: str(word.value.value)
        for node in model.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(node.value, ast.Call)
        for word in node.value.keywords
        if word.arg == "alias" and isinstance(word.value, ast.Constant)
    }


def _parsed(package: str, file: str) -> ast.Module:
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    return ast.parse((Path(found.origin).parent / file).read_text(encoding="utf-8"))


def _fields(file: str, name: str) -> Known:
    """The fields of a pydantic model of DeepSpeed's, by name and by alias, with those of the models that they hold."""
    module = _parsed("deepspeed", file)
    model = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name)
    found: dict[str, Known | None] = {}
    for node in model.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        below = _section(module, file, node.annotation)
        given = node.value.keywords if isinstance(node.value, ast.Call) else []
        aliases = [k.value.value for k in given if k.arg == "alias" and isinstance(k.value, ast.Constant)]
        found |= dict.fromkeys([*map(str, aliases), node.target.id], below)
    return found


def _section(module: ast.Module, file: str, annotation: ast.expr) -> Known | None:
    """The fields of the model that an annotation such as `Optional[OffloadConfig]` names, if it names one."""
    names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name) and node.id.endswith("Config")]
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name in names for alias in node.names):
            path = node.module.replace(".", "/") + ".py"
            place = path.removeprefix("deepspeed/") if node.level == 0 else str(Path(file).parent / path)
            return _fields(place, names[0])
    return None

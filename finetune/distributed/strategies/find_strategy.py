"""Finds the strategy of a launch, or of a model. Only the module that a launch asks for is imported."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.distributed.launch.launch_config import Launch
    from finetune.distributed.strategies.strategy import Strategy

_MODULES = {
    "single": "single",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "hsdp": "fsdp",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
}
"""Names of modules by the kind of a launch."""


def strategy_of(launch: "Launch") -> "Strategy":
    """Returns the strategy that a launch asks for."""
    return _load(_MODULES[launch.kind])


def strategy_of_model(model: Any, asked: "Strategy") -> "Strategy":
    """Returns the strategy that has prepared a model, which may be another than was asked for."""
    others = (_load(name) for name in dict.fromkeys(_MODULES.values()))
    return asked if asked.holds(model) else next(found for found in others if found.holds(model))


def _load(name: str) -> "Strategy":
    strategy: Strategy = import_module(f"finetune.distributed.strategies.{name}").STRATEGY
    return strategy

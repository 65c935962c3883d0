"""Where the run happens: the only package that knows one backend from another.

What needs torch is loaded when it is first asked for, so that a launch can be looked at without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from finetune.backend.devices import slow_precision
from finetune.backend.foresee import copies as copies_of
from finetune.backend.foresee import of_file as launch_of_file
from finetune.backend.launch import Launch
from finetune.backend.launch import read as read_launch
from finetune.backend.settle import Settled, derive_accumulation, settle

if TYPE_CHECKING:
    from finetune.backend import choice
    from finetune.backend.forecast import (
        Outline,
        adds_on_device,
        casts_weights,
        keeps_gradients,
        outline,
        places,
        steps_on_host,
    )
    from finetune.backend.forecast import state as state_of
    from finetune.backend.in_flight import Device, Passing, early_gradients, keeps_inputs_whole, late_gradients, passing
    from finetune.backend.memory import Memory
    from finetune.backend.pieces import Exchange, Piece
    from finetune.backend.process import Backend
    from finetune.backend.prove import Proof
    from finetune.backend.traffic import COLLECTIVES, Flow, flows

__all__ = [
    "COLLECTIVES",
    "Backend",
    "Device",
    "Exchange",
    "Flow",
    "Launch",
    "Memory",
    "Outline",
    "Passing",
    "Piece",
    "Proof",
    "Settled",
    "adds_on_device",
    "casts_weights",
    "choice",
    "copies_of",
    "derive_accumulation",
    "early_gradients",
    "flows",
    "keeps_gradients",
    "keeps_inputs_whole",
    "late_gradients",
    "launch_of_file",
    "outline",
    "passing",
    "places",
    "read_launch",
    "settle",
    "slow_precision",
    "state_of",
    "steps_on_host",
]

_FORECAST = ("Outline", "adds_on_device", "casts_weights", "keeps_gradients", "outline", "places", "steps_on_host")
_IN_FLIGHT = ("Device", "Passing", "early_gradients", "keeps_inputs_whole", "late_gradients", "passing")
_HEAVY = {"Backend": "process", "Exchange": "pieces", "Memory": "memory", "Piece": "pieces", "Proof": "prove"}
_HEAVY |= {**dict.fromkeys(("COLLECTIVES", "Flow", "flows"), "traffic"), **dict.fromkeys(_FORECAST, "forecast")}
_HEAVY |= dict.fromkeys(_IN_FLIGHT, "in_flight")


def __getattr__(name: str) -> Any:
    if name == "state_of":
        return importlib.import_module(f"{__name__}.forecast").state
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HEAVY[name]}"), name)

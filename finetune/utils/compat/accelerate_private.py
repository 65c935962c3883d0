"""Private names of accelerate."""

from collections.abc import Collection
from typing import Any

from accelerate import FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState, GradientState

from finetune.utils.compat.tested import require

require("accelerate", PartialState, "_shared_state")
require("accelerate", FullyShardedDataParallelPlugin, "_no_split_modules")
require("accelerate", AcceleratorState, "_reset_state")
require("accelerate", GradientState, "_reset_state")


def set_shared_state(**values: Any) -> None:
    """Changes what all instances of `PartialState` have in common."""
    PartialState._shared_state.update(values)


def reset_state() -> None:
    """Forgets what all instances have in common, so that another `Accelerator` can be made in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def unsplit_classes(model: Any) -> Collection[str]:
    """The classes of modules that are sharded as a whole: what accelerate reads off the model that it prepares."""
    names: Collection[str] = getattr(model, "_no_split_modules", ())
    return names

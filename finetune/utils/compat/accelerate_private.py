"""Private names of accelerate, and imports that it makes for nothing."""

import sys
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import other

from finetune.utils.compat.library_versions import require

require("accelerate", FullyShardedDataParallelPlugin, "_no_split_modules")
require("accelerate", AcceleratorState, "_reset_state")
require("accelerate", GradientState, "_reset_state")
require("accelerate", other, "is_deepspeed_available")

# To check if a model is of one of its classes, it imports DeepSpeed; no model is before that is imported elsewhere.
# Source: accelerate 1.15, `extract_model_from_parallel`.
other.is_deepspeed_available = lambda: sys.modules.get("deepspeed") is not None


def reset_state() -> None:
    """Resets the state that all instances share, so that another `Accelerator` can be made in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def sharding_over(accelerator: Any, mesh: Any) -> AbstractContextManager[Any]:
    """Makes FSDP2 shard over a mesh: of some of the ranks, or of copies by shards.

    Source: accelerate 1.15, `fsdp2_prepare_model` in `utils/fsdp_utils.py`.
    """
    copies, shards = (1, *mesh.shape)[-2:]
    config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=max(2, shards))
    meshes = {tuple(config.fsdp_dim_names): mesh}
    return patch.multiple(accelerator.state, parallelism_config=config, device_mesh=meshes)


def unsplit_classes(model: Any) -> Collection[str]:
    """Returns the classes of modules that are sharded as a whole; transformers names them, accelerate reads them."""
    return getattr(model, "_no_split_modules", None) or ()

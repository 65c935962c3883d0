"""finetune: one training loop for Hugging Face models on every backend of `accelerate`.

The recipe says what is learned; the launch config says where it runs.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.config.recipe_schema import *  # noqa: F403
    from finetune.data.rows.feed import Rows as Rows
    from finetune.export.load_model import LoadedModel as LoadedModel
    from finetune.tasks.causal_lm import causal_lm_logits as causal_lm_logits
    from finetune.tasks.task import (  # isort: skip
        Batch as Batch,
        Task as Task,
        TaskData as TaskData,
    )
    from finetune.training.api import (  # isort: skip
        Run as Run,
        Training as Training,
        launch as launch,
        load_recipe as load_recipe,
        start as start,
        train as train,
    )
    from finetune.training.loop import Step as Step
    from finetune.utils.errors import FinetuneError as FinetuneError

__version__ = "0.1.0"

# What is public, by module; imported when it is asked for, so that `finetune --help` is instant.
_PUBLIC = {
    "finetune.config.recipe_schema": (
        "BatchSection ChatSection CheckpointSection ChecksSection DataSection EvalSection GuardSection LengthSection "
        "LogSection LoraSection ModelSection OptimSection OutputSection Recipe ResumeSection SampleSection "
        "ScheduleSection Source TaskSection TokenizerSection"
    ),
    "finetune.data.rows.feed": "Rows",
    "finetune.export.load_model": "LoadedModel",
    "finetune.tasks.causal_lm": "causal_lm_logits",
    "finetune.tasks.task": "Batch Task TaskData",
    "finetune.training.api": "Run Training launch load_recipe start train",
    "finetune.training.loop": "Step",
    "finetune.utils.errors": "FinetuneError",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}

# torch reads this at its first tensor: whether it asks Linux for huge pages where a CPU tensor takes 2 MiB or more. A
# step allocates and frees its activations, and to get them in pages of 4 KiB is up to a tenth of its time.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# No library reports what is done with it. They read this when they are imported, so here, before any of them is.
for _name, _value in {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets
    "GRADIO_ANALYTICS_ENABLED": "False",  # which trackio builds on
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}.items():
    os.environ.setdefault(_name, _value)

# transformers and peft import torchao wherever it is installed. It tells of kernels that it does not find, which it has
# for GPUs of some kinds and nothing here uses, and torch of enumerations that it registers.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

# torch's CUDA build says it as soon as anything asks it for the folder of an op, on a machine that has no GPU.
logging.getLogger("torch.utils.cpp_extension").addFilter(lambda record: "No CUDA runtime" not in record.getMessage())


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'finetune' has no attribute '{name}'")
    importlib.import_module("finetune.utils.platforms").check()
    return getattr(importlib.import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])

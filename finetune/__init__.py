"""finetune: one training loop for Hugging Face models on every backend of `accelerate`.

The recipe says what is learned; the launch config says where it runs.
"""

import logging
import os

__version__ = "0.1.0"

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

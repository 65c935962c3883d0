"""Imports everything that a run imports. Multiprocessing's fork server loads this module (`forkserver.ForkServer`)."""

import functools
import gc
import importlib
import logging
import os
from contextlib import suppress

import private_uses

private_uses.watch()

# What takes longest to import of what a run imports, by then or later.
MODULES = (
    "accelerate.commands.launch",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "peft",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "transformers.models.llama.modeling_llama",
    "finetune.training.build_run",
    "finetune.training.loop",
)

LOADED_BY = os.getpid()
"""The process that has imported it all."""
_before = dict(os.environ)
# As `finetune.utils.library_imports` does: it looks for a kernel to download.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
for _module in MODULES:
    importlib.import_module(_module)
logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
# DeepSpeed's ops ask for it each time that they are loaded, and it takes a second.
_cpuinfo = importlib.import_module("cpuinfo.cpuinfo")
_cpuinfo.get_cpu_info_json = functools.cache(_cpuinfo.get_cpu_info_json)
_cpuinfo.get_cpu_info_json()
# Each process that writes a model compiles a thousand regular expressions first, of all that transformers ever renamed.
with suppress(ImportError, AttributeError):
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
SET_BY_IMPORTS = {key: value for key, value in os.environ.items() if _before.get(key) != value}
"""Variables that an import has set."""
# Forks share what was imported: a collection would look through all of it, and copy its pages by doing so.
gc.freeze()

"""The files of a pretrained model: where they lie, and in which dtype."""

import json
from pathlib import Path

import torch

from finetune.recipe import ModelSection

# As safetensors names them, the widest first.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(folder: Path) -> torch.dtype:
    """The widest floating type that a folder's weights are stored in: in it they are read without loss.

    Files that do not say it (not safetensors) count as fp32.
    """
    found = set()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        found |= {facts["dtype"] for name, facts in header.items() if name != "__metadata__"}
    return next((dtype for name, dtype in _FLOATS.items() if name in found), torch.float32)


def weights_folder(section: ModelSection) -> Path:
    """Where a pretrained model's files lie: its directory, or that of a hub model in the local cache."""
    name = str(section.name)
    if Path(name).is_dir():
        return Path(name)
    from transformers.utils import cached_file

    return Path(str(cached_file(name, "config.json", revision=section.revision))).parent

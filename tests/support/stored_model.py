"""Models that are stored in 16 bit."""

from pathlib import Path

import torch
from filelock import FileLock
from recipes_for_tests import ARCHITECTURES
from testdata import MODEL
from transformers import AutoConfig, AutoModelForCausalLM


def store(folder: Path, name: str, dtype: torch.dtype) -> str:
    """A model that is stored in 16 bit."""
    place = folder / f"{name}-{str(dtype).removeprefix('torch.')}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not place.exists():
            if name == "stories":
                network = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype)
            else:
                config = dict(ARCHITECTURES[name]["model"]["config"])
                quiet = {key: 0.0 for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if key in config}
                made = AutoConfig.for_model(config.pop("model_type"), vocab_size=512, **{**config, **quiet})
                torch.manual_seed(0)
                network = AutoModelForCausalLM.from_config(made).to(dtype)
            network.save_pretrained(f"{place}.part")
            Path(f"{place}.part").rename(place)
    return str(place)

"""The folder that holds `finetune/`, `accelerate_configs/` and `scripts/`."""

from pathlib import Path

import finetune

ROOT = Path(finetune.__file__).resolve().parents[1]

"""The folder that holds `finetune/`, `accelerate_configs/` and `scripts/`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

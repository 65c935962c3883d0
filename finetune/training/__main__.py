"""`python -m finetune.training RECIPE`: what `scripts/train.py` runs, where no checkout is beside the package."""

from finetune.training.entry_point import train_main
from finetune.utils.exit_codes import exit_with

if __name__ == "__main__":
    exit_with(train_main())

"""What `accelerate launch` runs: trains as a recipe says.

accelerate launch --config_file accelerate_configs/fsdp.yaml scripts/train.py recipes/sample.yaml optim.lr=1e-3
"""

import sys
from pathlib import Path

# Tasks of the user's own are imported from where the command is given.
sys.path.insert(0, str(Path.cwd()))

from finetune.utils.platforms import check_or_exit

if __name__ == "__main__":
    check_or_exit()
    from finetune.utils.signals import say_interrupts_in_one_line

    say_interrupts_in_one_line()
    from finetune.training.entry_point import train_main
    from finetune.utils.exit_codes import exit_with

    exit_with(train_main())

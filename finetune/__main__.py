"""`python -m finetune VERB …`, which is also what launchers start where a verb runs on several processes."""

from finetune.cli import main
from finetune.exits import exit_with

if __name__ == "__main__":
    exit_with(main())

"""`python -m finetune VERB …`, which is also what launchers start where a verb runs on several processes."""

from finetune.cli.main import main
from finetune.utils.exit_codes import exit_with

if __name__ == "__main__":
    exit_with(main())

"""`python -m finetune.training RECIPE`: what `scripts/train.py` runs, where no checkout is beside the package."""

from finetune.utils.signals import say_interrupts_in_one_line

if __name__ == "__main__":
    say_interrupts_in_one_line()
    from finetune.training.entry_point import train_main
    from finetune.utils.exit_codes import exit_with

    exit_with(train_main())

"""`python -m finetune.training RECIPE`: what `scripts/train.py` runs, where no checkout is beside the package."""

from finetune.utils.platforms import check_or_exit

if __name__ == "__main__":
    check_or_exit()
    from finetune.utils.signals import say_interrupts_in_one_line

    say_interrupts_in_one_line()
    from finetune.training.entry_point import train_main
    from finetune.utils.exit_codes import exit_with

    exit_with(train_main())

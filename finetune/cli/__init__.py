"""The command line."""

from finetune.utils.signals import say_interrupts_in_one_line

# The first import of the command: those that follow take a second, in which people press Ctrl-C.
say_interrupts_in_one_line()

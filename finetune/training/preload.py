"""Imports what every run imports: once, in a launcher whose workers are forks of it."""

import gc

import finetune.training.build_run
import finetune.training.loop  # noqa: F401

# A collection in a worker would look through all that was imported, and by doing so copy its pages.
gc.freeze()

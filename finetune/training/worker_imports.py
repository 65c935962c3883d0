"""Imports of every run, for a launcher whose workers are forks of it."""

import finetune.monitoring.out_of_memory
import finetune.training.build_run
import finetune.training.entry_point
import finetune.training.loop  # noqa: F401

"""What every run imports, for `python -m finetune.training` and for a launcher whose workers are forks of it."""

import finetune.training.build_run
import finetune.training.loop
import finetune.utils.silence_libraries  # noqa: F401

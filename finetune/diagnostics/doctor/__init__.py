"""`finetune doctor`: whether this machine has what a run needs, and what to do where it has not."""

"""`finetune doctor`: checks that this machine has what a run needs, and says what to do where it has not."""

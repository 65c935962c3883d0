"""Checkpoints with one layout, written and read by every backend on any number of processes."""

from finetune.checkpoint.folder import (
    clean,
    listed,
    name_of,
    read_manifest,
    read_state,
    reading,
    step_of,
    unnamed,
    verify,
)
from finetune.checkpoint.load import Checkpoint, adopt, find, newest, restore, verified
from finetune.checkpoint.save import Outcome, Saver, require

__all__ = [
    "Checkpoint",
    "Outcome",
    "Saver",
    "adopt",
    "clean",
    "find",
    "listed",
    "name_of",
    "newest",
    "read_manifest",
    "read_state",
    "reading",
    "require",
    "restore",
    "step_of",
    "unnamed",
    "verified",
    "verify",
]

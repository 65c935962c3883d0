"""`scripts/train.py`, which writes down in the file DIGESTED which rank reads which of the base's files."""

import os
import sys
from pathlib import Path

from finetune.checkpoint import run_fingerprint
from finetune.training import entry_point
from finetune.utils import atomic_files

_digest = atomic_files.file_digest


def digest(file: Path) -> str:
    with open(os.environ["DIGESTED"], "a") as said:
        said.write(f"{os.environ.get('RANK', '0')} {file.name}\n")
    return _digest(file)


if __name__ == "__main__":
    run_fingerprint.file_digest = digest
    run_fingerprint._SETTLED_NS = 0  # the base was made a moment ago
    sys.exit(entry_point.train_main())

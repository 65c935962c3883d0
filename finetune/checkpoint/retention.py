"""Which checkpoints are kept, and how the others are deleted."""

import fcntl
import math
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from finetune.checkpoint.integrity import DOOMED, STAGING, complete, list_checkpoints, lock, open_manifest
from finetune.utils.atomic_files import remove
from finetune.utils.errors import CheckpointError


def prune(root: Path, *, keep: int, keep_best: bool, broken: Collection[str] = ()) -> None:
    """Deletes all checkpoints but the newest `keep` and, if asked, the one with the lowest validation loss.

    Only complete ones count and only complete ones are deleted; one that is being read stays until the next time.
    Call it from one process, after a checkpoint was sealed.

    Args:
        broken: Names of folders whose content was found damaged: they do not count either.

    Raises:
        OSError: If a folder cannot be deleted.
    """
    whole: list[tuple[Path, dict[str, Any]]] = []
    for folder in list_checkpoints(root):
        try:
            if folder.name not in broken:
                whole.append((folder, complete(folder)))
        except CheckpointError:
            continue
    staying = {folder for folder, _ in whole[:keep]}
    scored = [(m["validation_loss"], folder) for folder, m in whole if m.get("validation_loss") is not None]
    scored = [(loss, folder) for loss, folder in scored if math.isfinite(loss)]
    if keep_best and scored:
        staying.add(min(scored, key=lambda pair: pair[0])[1])
    for folder, _ in whole:
        if folder not in staying:
            _delete(folder)


def _delete(folder: Path) -> None:
    finally_gone = folder.with_name(folder.name + DOOMED)
    # Open for writing: over NFS, only such files can be locked against others.
    with os.fdopen(open_manifest(folder, os.O_RDWR), "r+b") as opened:
        try:
            lock(opened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        # Renamed first: a deletion that is cut short must not look like a damaged checkpoint.
        folder.rename(finally_gone)
    shutil.rmtree(finally_gone)


def clean(root: Path) -> None:
    """Removes what a run that was cut short left half written or half deleted."""
    for path in root.glob("step-*"):
        if path.suffix in (STAGING, DOOMED):
            with suppress(OSError):
                remove(path)

"""Disks and shared memory."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from finetune.doctor.finding import Asked, Finding, failure, ok, warning
from finetune.layers import flat

GIB = 2**30
# Checkpoints of a small model fit into the first; less than the second leaves nothing for logs and caches.
ROOMY, FULL = 10 * GIB, GIB // 4
SHARED = Path("/dev/shm")


def folders(asked: Asked) -> Iterable[Finding]:
    """Whether there is room where a run writes."""
    for what, folder in _folders(asked).items():
        place = existing(folder)
        free = shutil.disk_usage(place).free
        found = f"{what}: {folder}, {free / GIB:.1f} GiB free"
        if not os.access(place, os.W_OK | os.X_OK):
            yield failure("disk", f"{what}: {folder}, which this user may not write", "name another folder")
        elif free < FULL:
            yield failure("disk", found, "make room, or name a folder on another disk")
        elif free < ROOMY:
            yield warning("disk", found, "a checkpoint of AdamW takes 12 bytes a trained parameter, and `keep` stay")
        else:
            yield ok("disk", found)


def shared_memory(asked: Asked) -> Iterable[Finding]:
    """Whether processes can share memory; a container has 64 MiB unless told otherwise."""
    from finetune.backend.ops_look import shared_bytes

    advice = "give the container more: docker run --shm-size=8g (or --ipc=host)"
    if not SHARED.is_dir():
        yield failure("shared memory", f"there is no {SHARED}", f"mount a tmpfs there; {advice}")
        return
    free, needs = shutil.disk_usage(SHARED).free, shared_bytes(asked.launch, asked.local)
    found = f"{free / GIB:.2f} GiB free"
    if free < needs:
        yield failure("shared memory", f"{found}; this launch maps {needs / GIB:.2f} GiB", advice)
    elif free < GIB:
        yield warning("shared memory", f"{found}; NCCL and workers that tokenise may need more", advice)
    else:
        yield ok("shared memory", found)


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    place = folder.absolute()
    return next(p for p in (place, *place.parents) if p.is_dir())


def _folders(asked: Asked) -> dict[str, Path]:
    recipe, home = asked.recipe, Path(asked.env.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    found = {
        "run directory": Path(recipe.output.dir if recipe else "runs"),
        "data cache": Path(recipe.data.cache_dir if recipe else ".cache/finetune"),
        "hub cache": Path(asked.env.get("HF_HUB_CACHE", home / "hub")),
    }
    for key, value in flat(asked.launch.ds_config if asked.launch else {}).items():
        if key.endswith(".nvme_path"):
            found[key] = Path(value)
    return found

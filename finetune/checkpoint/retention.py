"""Decides which checkpoints stay, and deletes the others."""

import math
from collections.abc import Collection

from finetune.checkpoint import integrity
from finetune.checkpoint.checkpoint_store import CheckpointStore
from finetune.config.recipe_schema import ranking


def prune_checkpoints(store: CheckpointStore, *, keep: int, best_by: str | None, broken: Collection[str] = ()) -> None:
    """Deletes all checkpoints but the newest `keep` and, if asked, the one that is best by an evaluation's value.

    Only complete ones count and only complete ones are deleted; one that is being read stays until the next time.
    Call it from one process, after a checkpoint was sealed.

    Args:
        best_by: As `checkpoint.keep_best_by` has it.
        broken: Names of checkpoints whose content was found damaged: they do not count either.

    Raises:
        OSError: If one cannot be deleted.
    """
    whole = list(integrity.list_whole(store, broken))
    staying = {name for name, _ in whole[:keep]}
    if best_by is not None:
        key, sign = ranking(best_by)
        scored = [(sign * m[key], name) for name, m in whole if m.get(key) is not None and math.isfinite(m[key])]
        staying |= {max(scored, key=lambda pair: pair[0])[1]} if scored else set()
    for name, _ in whole:
        if name not in staying:
            store.delete(name)

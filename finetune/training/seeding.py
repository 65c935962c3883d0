"""Seeds for each step and micro-batch, so that randomness has no history."""

import numpy as np
import torch


def seed_torch(*parts: int) -> None:
    """Seeds torch from whole numbers, so that randomness has no history.

    Source: numpy's SeedSequence, whose mixing is fixed for all versions.
    """
    seed = int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0])
    # What torch.manual_seed does, which writes down a stack trace for each kind of device that is not there.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)

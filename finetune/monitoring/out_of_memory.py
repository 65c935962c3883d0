"""Explains out-of-memory errors."""

import os

import psutil
import torch

from finetune.utils.errors import MemoryFullError
from finetune.utils.platforms import peak_bytes


def explain_out_of_memory(error: BaseException, *, building: bool = False) -> MemoryFullError | None:
    """An out-of-memory error, when `building` the network or later, as a paragraph: what was held, and what lowers it.

    None for any other error.
    """
    text = str(error)
    full = isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    )
    if not full:
        return None
    # Beside a GPU the host's memory may run out, too.
    of_host = isinstance(error, MemoryError) or "can't allocate memory" in text
    if torch.cuda.is_available() and not of_host:
        held, most, owner = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), "device"
        free, total = torch.cuda.mem_get_info()
    else:
        machine, owner = psutil.virtual_memory(), "machine"
        held, most = psutil.Process().memory_info().rss, peak_bytes()
        free, total = machine.available, machine.total
    gib = [f"{number / 2**30:.2f}" for number in (held, most, total, free)]
    change = (
        "The network itself does not fit: take a smaller one, pack its weights (model.quantization, with lora)"
        if building
        else "Lower batch.micro_size (the global batch stays), set model.gradient_checkpointing: true, lower "
        "data.sequence_length, train adapters (lora)"
    )
    rank, reason = os.environ.get("RANK", "0"), " ".join(text.split())[:300]
    return MemoryFullError(
        f"Out of memory on rank {rank}: {reason} Held by this process: {gib[0]} GiB, at most {gib[1]}; of the "
        f"{owner}'s {gib[2]} GiB {gib[3]} are free. {change}, or take a launch file of accelerate_configs/ that shards "
        "or offloads more."
    )

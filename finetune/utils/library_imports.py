"""Quick and quiet imports of libraries."""

import gc
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Keeps the garbage collector from running during imports, and from scanning what they have made later.

    Source: Python, `gc.freeze`, which also keeps the pages that a fork shares with its parent unchanged.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def silence_libraries() -> None:
    """Turns down progress bars and repeated notices; errors and important warnings stay."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Read when it is imported, which few runs need: it takes a second.
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    # Accelerate notes per parameter that FSDP2 keeps fp32 master weights, which the start line says as well.
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    # It looks for a kernel to download.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*OMP_NUM_THREADS.*")
    warnings.filterwarnings("ignore", category=FutureWarning)

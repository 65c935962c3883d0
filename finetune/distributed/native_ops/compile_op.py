"""The child process that compiles one native op. It is run by its path and imports nothing else of this package."""

import signal
import sys
from contextlib import suppress
from typing import Any

import psutil


def compile_op(builder_class: str) -> None:
    """Builds and loads one op as DeepSpeed itself would.

    Args:
        builder_class: A class of `deepspeed.ops.op_builder`.
    """
    signal.signal(signal.SIGINT, _end)
    signal.signal(signal.SIGTERM, _end)

    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    builder = accelerator.create_op_builder(builder_class)
    if builder is None:
        sys.exit(f"error: DeepSpeed has no {builder_class} for {accelerator.device_name()}")
    # Verbose, because ninja's own count is what the progress reads.
    builder.load(verbose=True)


def _end(number: int, _: Any) -> None:
    """Ends the compilers too: subprocess would kill ninja, which then leaves them."""
    jobs = psutil.Process().children(recursive=True)
    for job in jobs:
        with suppress(psutil.NoSuchProcess):
            job.terminate()
    _, alive = psutil.wait_procs(jobs, timeout=5)
    for job in alive:
        with suppress(psutil.NoSuchProcess):
            job.kill()
    # As an exception it passes torch's `finally`, which removes the lock.
    sys.exit(128 + number)


if __name__ == "__main__":
    compile_op(sys.argv[1])

"""The child process that compiles one native op. It is run by its path and imports nothing else of this package."""

import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import psutil


def compile_op(builder_class: str) -> None:
    """Builds and loads one op as DeepSpeed itself would.

    Args:
        builder_class: A class of `deepspeed.ops.op_builder`.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        # Left to subprocess, ninja would be killed and its compilers live on; asked, it ends them first.
        # A terminal's Ctrl-C reaches ninja too, and of two signals it may die before it has ended its compilers.
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

    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGTERM, end)

    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    builder = accelerator.create_op_builder(builder_class)
    if builder is None:
        sys.exit(f"error: DeepSpeed has no {builder_class} for {accelerator.device_name()}")
    # Verbose, because ninja's own count is what the progress reads.
    builder.load(verbose=True)


if __name__ == "__main__":
    compile_op(sys.argv[1])

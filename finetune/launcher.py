"""Runs `accelerate launch`, and ends with the workers' exit code instead of the launcher's traceback."""

import os
import subprocess
import sys
from pathlib import Path


def launch(config_file: str, num_processes: int | None, arguments: list[str]) -> int:
    """Starts the workers of a launch file on `scripts/train.py` and waits for them; returns the exit code.

    The workers have said what was wrong by the time they end, so the launcher's own account of it, a traceback
    of `accelerate` itself, is left out.
    """
    script = Path(__file__).resolve().parent.parent / "scripts" / "train.py"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config_file]
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    process = subprocess.Popen([*command, str(script), *arguments], stderr=subprocess.PIPE, env=os.environ)
    assert process.stderr is not None
    muted = False
    for line in process.stderr:
        # The launcher's report opens with one of these; what workers print comes before it.
        muted = muted or line.startswith((b"Traceback (most recent call last)", b"E1", b"W1")) and process.poll() is None
        if not muted:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
    return process.wait()

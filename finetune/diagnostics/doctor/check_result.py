"""Results of checks, the run that they are about, and a process of their own to try something out."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.predicted_environment import PredictedEnvironment


@dataclass(frozen=True)
class CheckResult:
    """Line of the report."""

    check: str
    status: Literal["ok", "warning", "failure"] = field(default="ok", kw_only=True)
    """`warning`: a run would go, but slower, or not as meant; `failure`: it would fail."""
    found: str
    advice: str = ""
    """Advice for the user; without it, what was found says what to do, as errors do."""


@dataclass(frozen=True)
class Asked:
    """Run that the checks are about, as far as it is known."""

    recipe: Recipe | None = None
    foreseen: PredictedEnvironment | None = None
    """Environment that the launch file asks for; None without one."""
    env: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def launch(self) -> Launch | None:
        return self.foreseen.launch if self.foreseen else None

    @property
    def local(self) -> int:
        """Processes on this machine."""
        return self.foreseen.local if self.foreseen else 1

    @property
    def machines(self) -> int:
        return self.foreseen.asked.num_machines if self.foreseen else 1


ok = CheckResult
warning = partial(CheckResult, status="warning")
failure = partial(CheckResult, status="failure")


def run_probe(script: str, *words: str, env: Mapping[str, str], limit_s: float = 120.0) -> tuple[str, str]:
    """Runs a Python script in a process of its own, which a native library may end; nothing that it starts outlives it.

    Returns its output, and the last line of its complaint. The limit has room for an import of torch from a slow disk.
    """
    command, pipe = [sys.executable, "-c", script, *words], subprocess.PIPE
    # A group of its own, so that whatever it starts ends with it.
    process = subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        printed, complaint = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {limit_s:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode == 0:
        return printed.strip(), ""
    lines = complaint.strip().splitlines()
    return "", lines[-1] if lines else f"it ended with {process.returncode}"

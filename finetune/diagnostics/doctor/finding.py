"""What a check reports, and what it is given."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from finetune.config.recipe_schema import Recipe
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.launch_environment import LaunchEnvironment

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    status: Status
    found: str
    advice: str = ""
    """What to do."""


@dataclass(frozen=True)
class Asked:
    """The run that is asked about, as far as it is known."""

    recipe: Recipe | None = None
    foreseen: LaunchEnvironment | None = None
    """What the launch file asks for; None without one."""
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
        return int(self.foreseen.get("num_machines")) if self.foreseen else 1


def ok(check: str, found: str) -> Finding:
    """All is well."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, advice: str) -> Finding:
    """A run would go, but slower, or not as meant."""
    return Finding(check, "warning", found, advice)


def failure(check: str, found: str, advice: str = "") -> Finding:
    """A run would fail. Without advice, what was found says what to do, as errors do."""
    return Finding(check, "failure", found, advice)

"""Programs beyond Python that tests run, and tests that are skipped because one of them is not installed.

Whatever runs such a program asks for it here: a test by the marker that `needs` returns, a helper by `require`.
"""

import os
import shutil
from collections.abc import Iterable, Sequence
from unittest import mock

import pytest

from finetune.distributed import native_ops

PACKAGES = {
    "bash": "bash",
    "c++": "g++",
    "chromedriver": "chromium-driver",
    "chromium": "chromium",
    "getent": "libc-bin",
    "hostname": "hostname",
    "ip": "iproute2",
    "make": "make",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
    "ps": "procps",
    "sbatch": "slurm-wlm",
    "slurmctld": "slurm-wlm",
    "slurmd": "slurm-wlm",
    "umount": "mount",
    "unshare": "util-linux",
}
"""The package of Debian and Ubuntu that installs each program."""

REASON = "not installed: "
"""How the reason begins for which tests are skipped; the programs follow, separated by commas."""


def why_missing(*programs: str, path: str | None = None) -> str | None:
    """Returns the reason to skip a test that runs some programs; None if all are installed.

    Args:
        path: The folders to look in; those of PATH if left out.
    """
    assert set(programs) <= PACKAGES.keys(), "which package installs it?"
    # torch's rule for the compiler.
    names = {program: os.environ.get("CXX", program) if program == "c++" else program for program in programs}
    missing = [program for program, name in names.items() if shutil.which(name, path=path) is None]
    return REASON + ", ".join(missing) if missing else None


def needs(*programs: str, path: str | None = None) -> pytest.MarkDecorator:
    """Returns the marker of tests that run some programs."""
    reason = why_missing(*programs, path=path)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def require(*programs: str) -> None:
    """Skips the test that asks, unless all of some programs are installed."""
    if reason := why_missing(*programs):
        pytest.skip(reason)


def why_no_ops(*ops: str) -> str | None:
    """Returns the reason to skip a test that needs native ops of DeepSpeed; None if they can be compiled."""
    with mock.patch.dict(os.environ):
        native_ops.prepare_environment()
        for op in ops:
            if missing := native_ops.find_missing(op):
                return why_missing("c++") or f"op {op} cannot be compiled: {missing[0]} ({missing[1]})"
    return None


def needs_ops(*ops: str) -> pytest.MarkDecorator:
    """Returns the marker of tests that need native ops of DeepSpeed."""
    reason = why_no_ops(*ops)
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def require_ops(ops: Sequence[str]) -> None:
    """Skips the test that asks, unless native ops of DeepSpeed can be compiled; builds those that are not built yet."""
    if reason := why_no_ops(*ops):
        pytest.skip(reason)
    with mock.patch.dict(os.environ):
        # Here, where no limit is set for a launch.
        native_ops.ensure_built(ops, quiet=True)


def missing_in(reason: str) -> list[str]:
    """Returns the programs that a reason names; none if a test was skipped for something else."""
    return reason.removeprefix(REASON).split(", ") if reason.startswith(REASON) else []


def install_lines(reasons: dict[str, int]) -> Iterable[str]:
    """Yields a line for each program that is not installed: how many tests run it, and what installs it.

    Args:
        reasons: How many tests were skipped for each reason.
    """
    tests: dict[str, int] = {}
    for reason, number in reasons.items():
        for program in missing_in(reason):
            tests[program] = tests.get(program, 0) + number
    for program, number in sorted(tests.items()):
        plural = "s run" if number > 1 else " runs"
        yield f"{program}, which {number} skipped test{plural}, comes with: apt-get install {PACKAGES[program]}"

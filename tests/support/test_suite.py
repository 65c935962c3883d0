"""The suite itself: what it starts does not depend on the shell, and what it lacks here is skipped and named."""

import os
import sys
from pathlib import Path

import pytest
from external_commands import PACKAGES, why_missing
from forkserver import ForkServer
from harness import ROOT, environment, run

# What Python itself ignores.
SHOW = "import signal; print(*(n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN))"
IGNORED = "13 25\n"


def pytest_here(*words: str, **variables: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *words]


def test_signals_have_their_default_action_in_what_tests_start(fork_server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    assert run([sys.executable, str(script)]) == (0, IGNORED)
    assert fork_server.run([str(script)]) == (0, IGNORED)


def test_they_have_so_under_a_shell_that_ignores_them() -> None:
    """As `nohup` ignores SIGHUP, and a shell without job control SIGINT and SIGQUIT for what runs in the background."""
    test = f"{__file__}::{test_signals_have_their_default_action_in_what_tests_start.__name__}"
    code, output = run(["sh", "-c", "trap '' HUP INT QUIT; exec \"$@\"", "sh", *pytest_here(test)])
    assert code == 0, output
    assert "1 passed" in output

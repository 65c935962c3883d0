"""The suite itself: the shell changes nothing of what it starts, and what is not installed is skipped and named."""

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from external_commands import PACKAGES, install_lines
from forkserver import ForkServer
from harness import ROOT, WAIT_S, environment, run

# What Python itself ignores: SIGPIPE and SIGXFSZ.
SHOW = "import signal; print(*(n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN))"
IGNORED = "13 25\n"

# A test of each program, or several.
TESTS = {
    "bash": "cli/test_completion.py::test_a_section_takes_no_value",
    "c++": "distributed/test_native_ops.py::test_two_processes_build_once "
    "distributed/test_state_transfer.py::test_goes_on_from_the_disk",
    "chromedriver": "scripts/test_build_docs.py::test_in_a_browser",
    "make": "cli/test_demo_qlora.py::test_the_target_runs_the_script",
    "sbatch": "cli/test_print_cluster_job.py::test_slurm_preempts_a_job_and_requeues_it_but_does_not_requeue_what_is_"
    "cancelled",
    "umount": "checkpoint/test_full_disk.py::test_the_one_before_is_gone_on_from",
}
ON_MACHINES = {
    "getent": "support/test_machines.py::test_own_name",
    "nft": "support/test_machines.py::test_a_firewall distributed/test_machines_meet.py::test_a_firewall_is_found",
    "ps": "support/test_machines.py::test_a_machine_has_things_of_its_own",
}
WITHOUT_MACHINES = {
    "chromium": "scripts/test_build_docs.py::test_in_a_browser",
    **dict.fromkeys(("hostname", "ip", "mount", "nsenter", "unshare"), "support/test_machines.py"),
}


def run_tests(*words: str, shell: str = "", **variables: str) -> tuple[int, str]:
    """Runs some of the tests, not as CI does, behind a command of the shell."""
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *words]
    env = {
        name: value
        for name, value in environment().items()
        if name not in ("CI", "FINETUNE_DURATIONS", "FINETUNE_OPS_PID")
    }
    return run(["sh", "-c", f'{shell} exec "$@"', "sh", *pytest_here], env=env | variables)


def test_signals_have_their_default_action_in_what_tests_start(fork_server: ForkServer, tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(SHOW)
    assert run([sys.executable, str(script)]) == (0, IGNORED)
    assert fork_server.run([str(script)]) == (0, IGNORED)


def test_they_have_so_under_a_shell_that_ignores_them() -> None:
    """As `nohup` ignores SIGHUP, and a shell without job control SIGINT and SIGQUIT for what runs in the background."""
    name = test_signals_have_their_default_action_in_what_tests_start.__name__
    code, output = run_tests(f"{__file__}::{name}", shell="trap '' HUP INT QUIT;")
    assert code == 0, output
    assert "1 passed" in output


def path_without(folder: Path, *programs: str) -> str:
    """Makes a folder for PATH of all that there is but some programs."""
    (folder / "bin").mkdir(parents=True)
    for program in (file for path in os.environ["PATH"].split(os.pathsep) for file in Path(path).glob("*")):
        link = folder / "bin" / program.name
        if program.name not in programs and not link.is_symlink():
            link.symlink_to(program)
    return str(folder / "bin")


@pytest.mark.parametrize(
    "tests",
    [TESTS, pytest.param(ON_MACHINES, marks=pytest.mark.machines), WITHOUT_MACHINES],
    ids=["programs", "on_machines", "without_machines"],
)
def test_what_is_not_installed_is_skipped_and_named(tests: dict[str, str], tmp_path: Path) -> None:
    """Two programs of a test are not missing at the same time, but for those that machines are made of."""
    names = {f"tests/{name}" for several in tests.values() for name in several.split()}
    code, output = run_tests(*sorted(names), PATH=path_without(tmp_path, *tests))
    assert code == 0, output
    assert not {"passed", "failed", "error"} & {*output.splitlines()[-1].split()}, output
    for program in tests:
        assert f"\n{program}, which " in output
        assert f": apt-get install {PACKAGES[program]}\n" in output
    # CI has a compiler.
    if "c++" in tests:
        code, output = run_tests(
            f"tests/{TESTS['c++'].split()[0]}", PATH=path_without(tmp_path / "again", "c++"), CI="true"
        )
        assert code == 1, output
        assert "CI: tests were skipped for reasons that conftest.py does not list: {'not installed: c++'}" in output


def test_programs_are_counted() -> None:
    reasons = {"not installed: nft, ip": 2, "not installed: nft": 1, "needs a GPU": 5}
    assert [*install_lines(reasons)] == [
        "ip, which 2 skipped tests run, comes with: apt-get install iproute2",
        "nft, which 3 skipped tests run, comes with: apt-get install nftables",
    ]
    assert [*install_lines({"not installed: ps": 1})] == [
        "ps, which 1 skipped test runs, comes with: apt-get install procps"
    ]


def calls(*names: str) -> Iterator[tuple[Path, ast.Call]]:
    """Calls of functions of some names, whosever they are, in all tests."""
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in names:
                yield file, node


def test_programs_that_tests_start_by_name_are_known() -> None:
    """A new one is listed with its package, and asked for where it is started."""
    started = set()
    for _, call in calls("run", "Popen", "start", "Terminal"):
        for words in call.args:
            if isinstance(words, ast.List) and words.elts and isinstance(words.elts[0], ast.Constant):
                started.add(str(words.elts[0].value))
    by_name = {name for name in started if "/" not in name and "." not in name and not name.startswith("-")}
    assert by_name - {"sh", "sleep"} <= PACKAGES.keys()
    assert "bash" in by_name


def test_waits_end_within_minutes() -> None:
    """A number of seconds is a minute at most; what takes longer has a name, and that for launches is for them."""
    for file, call in calls("until", "wait", "join", "communicate", "run", "wait_procs", "urlopen", "select"):
        for limit in (*call.args, *(keyword.value for keyword in call.keywords)):
            where = f"{file.relative_to(ROOT)}:{call.lineno}"
            if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float):
                assert limit.value <= WAIT_S, where
            if isinstance(limit, ast.Name) and file.parent.name != "support":
                assert limit.id != "LIMIT_S", where

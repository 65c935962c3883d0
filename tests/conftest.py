import gc
import os
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import durations
import machines
import psutil
import pytest
import testdata
from external_commands import install_lines, missing_in
from forking_python import ForkingPython
from forkserver import ForkServer
from harness import Launcher
from hypothesis import settings
from ranks import Here, Place, lines

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# On a busy machine an example can take any time; speed is the benchmark's business. Examples are the same each time, so
# that what a change breaks is the change's fault; `make test-search` looks for others, from a seed.
settings.register_profile("project", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("project")

# Why a test may be skipped, by the marker that says what it needs; and what else a CI machine may lack. A skip
# for any other reason fails a CI run.
NEEDS = {
    "gpu": "needs a CUDA device",
    "real_data": f"compares with published figures, on data at {testdata.REAL}",
    "machines": machines.LACK,
}
MAY_LACK = (
    "needs the extra [bench]",
    "needs the extra [harness]",
    "needs the extra [serve]",
    "needs the extra [gguf]",
    "needs xllamacpp",
    "needs sentence-transformers",
    "needs the schemas of Kubernetes and Kubeflow",
    "only this kind of processor has the kernel",
    "this kernel has no huge pages to ask for",
    "a file system cannot be mounted here",
    "there is a real GPU",
    "has a GPU",
    "this GPU has no fp8",
    # In tests/versions/, what one set lacks; docs/versions.md has what that means.
    *("this torch ", "this transformers ", "this pyarrow "),
    "what is refused here runs on a GPU",
    "says what happens without a GPU",
    "GPT-2 has nothing to pack",
)
# `.ci/run` installs these if it may; without the other programs CI fails.
PROGRAMS_CI_MAY_LACK = {"chromedriver", "chromium", "ip", "nft", "sbatch", "slurmctld", "slurmd"}
MOST_ON_REAL_DATA = 10

# What `make test-quick` runs, in at most 4 minutes on 2 cores: a run of each launch kind, a test of each row of the
# support matrix, resume, LoRA and QLoRA, export, the errors, and what rests on names and behaviour of the libraries.
QUICK = {
    *(
        "test_every_launch_kind",
        "test_gloo_workers",
        "test_state_transfer",
        "test_fake_device",
        "test_loop",
    ),
    *("test_resume", "test_save_checkpoint", "test_checkpoint_files", "test_export", "test_export_use"),
    *("test_qlora", "test_attention", "test_activation_checkpointing", "test_chunked_loss", "test_rope_scaling"),
    *("test_pretrained_files", "test_optimizers", "test_chat_masks", "test_chat_records", "test_data_readers"),
    *("test_recipe", "test_launch_files", "test_broken_input", "test_doctor", "test_explain"),
    *("test_compat", "test_library_versions", "test_file_formats", "test_plan_formulas"),
}


def pytest_configure(config: pytest.Config) -> None:
    # Once, before workers start; a run that only looks at one file needs it too.
    if not hasattr(config, "workerinput"):
        testdata.ensure()
        # Runs sign the code that they led to by a secret in the user's home.
        os.environ["XDG_STATE_HOME"] = state = tempfile.mkdtemp(prefix="finetune-state-")
        config.add_cleanup(lambda: shutil.rmtree(state))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    there = {"gpu": torch.cuda.is_available(), "real_data": testdata.REAL.is_dir()}
    if "quick" not in config.option.markexpr and not any("test_every_launch_kind" in word for word in config.args):
        # What they show, others show more closely; they are for `make test-quick`.
        items[:] = [item for item in items if item.path.stem != "test_every_launch_kind"]
    if config.option.dist == "loadgroup" or "PYTEST_XDIST_WORKER" in os.environ:
        durations.longest_first(items)
    rows: set[str] = set()
    if "quick" in config.option.markexpr:
        from support_matrix import quick_proofs

        rows = quick_proofs()
    wanted = any(item.get_closest_marker("machines") is not None for item in items)
    there["machines"] = not (lack := machines.lacking() if wanted else None)
    for item in items:
        # xdist adds the group.
        plain = re.sub(r"@[^\]]*$", "", item.nodeid)
        # The op for NVMe alone takes three minutes to compile.
        if (item.path.stem in QUICK or plain in rows) and item.get_closest_marker("nvme") is None:
            item.add_marker(pytest.mark.quick)
        for marker, reason in NEEDS.items():
            if item.get_closest_marker(marker) is not None and not there[marker]:
                item.add_marker(pytest.mark.skip(reason=lack if marker == "machines" and lack else reason))
    # What the tests' modules import stays: exports collect garbage, and would look through all of it each time.
    gc.freeze()
    on_real_data = [item.nodeid for item in items if item.get_closest_marker("real_data") is not None]
    if len(on_real_data) > MOST_ON_REAL_DATA:
        raise pytest.UsageError(
            f"{len(on_real_data)} tests need data that no user has; at most {MOST_ON_REAL_DATA} may: {on_real_data}"
        )


# Outermost, so that no test's own limit counts the time.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Waits until `make test` has compiled the op for NVMe, the last one, where a test needs it.

    The others are there within two minutes, and launches wait for those that they need.
    """
    needs_all = item.get_closest_marker("nvme") is not None or item.path.stem == "test_native_ops"
    if needs_all and (builder := os.environ.pop("FINETUNE_OPS_PID", None)):
        with suppress(psutil.NoSuchProcess):
            while psutil.Process(int(builder)).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.2)
    return (yield)


def _reasons(reporter: pytest.TerminalReporter) -> Counter[str]:
    return Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", []))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reasons = _reasons(terminalreporter)
    for line in (*(f"skipped {count}: {reason}" for reason, count in reasons.items()), *install_lines(reasons)):
        terminalreporter.write_line(line)


def _is_foreseen(reason: str) -> bool:
    if programs := missing_in(reason):
        return PROGRAMS_CI_MAY_LACK.issuperset(programs)
    return reason.startswith((*NEEDS.values(), *MAY_LACK))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and "FINETUNE_DURATIONS" in os.environ:
        durations.write(reporter.stats)
    if reporter is None or not os.environ.get("CI"):
        return
    unforeseen = {reason for reason in _reasons(reporter) if not _is_foreseen(reason)}
    if unforeseen:
        reporter.write_line(f"CI: tests were skipped for reasons that conftest.py does not list: {unforeseen}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> None:
    """Gives signals that the shell ignores, as `nohup` does, their default action in whatever tests start.

    A process inherits that a signal is ignored, and no handler. So this process goes on as if it ignored them.
    """
    # Python itself ignores two, and restores their action where it starts a program.
    for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(scope="session")
def fork_server() -> ForkServer:
    return ForkServer()


@pytest.fixture(scope="session")
def quick_python(fork_server: ForkServer) -> Iterator[str]:
    """A `python` for commands in a shell, whose starts are forks."""
    # A socket's path may have a hundred characters.
    with tempfile.TemporaryDirectory(prefix="finetune-python-") as folder:
        made = ForkingPython(fork_server, Path(folder))
        yield str(made.executable)
        made.end()


@pytest.fixture(scope="session")
def launcher(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, worker_id: str, fork_server: ForkServer
) -> Launcher:
    """Launches runs, shared by all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    modules = dict.fromkeys(item.module for item in request.session.items if isinstance(item, pytest.Function))
    # Each xdist worker has a folder of its own below one that they share.
    return Launcher((base if worker_id == "master" else base.parent) / "launched", fork_server.launch, list(modules))


@pytest.fixture
def place(tmp_path: Path, fork_server: ForkServer) -> Place:
    made = Place(tmp_path, fork_server)
    made.write("train.jsonl", lines(60))
    return made


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    return Here(monkeypatch, capsys)

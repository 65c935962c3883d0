"""`finetune launch`: what its processes import, and how workers that are forks of it start and end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forkserver import until
from harness import ROOT, RUN_S, WAIT_S, environment, run
from ranks import Place, by_finetune, by_launcher

# Python imports it when it starts; forks have the same. Written where `os._exit` ends a rank, and at a launcher's exit.
SEEN = """
import atexit, os, sys, threading
end = os._exit
def write():
    name = os.environ.get("RANK", "launcher")
    with open(os.path.join(os.environ["MODULES"], name), "w") as file:
        file.write("\\n".join(sorted(name for name, module in list(sys.modules.items()) if module is not None)))
def seen(code):
    write()
    end(code)
os._exit = seen
atexit.register(write)
"""
# Each takes seconds, and is for what a recipe or a launch file asks for.
LIBRARIES = {"bitsandbytes", "datasets", "deepspeed", "matplotlib", "pandas", "peft", "pyarrow", "scipy", "sklearn"}


def imported(place: Place, config: str, **sections: Any) -> dict[str, set[str]]:
    """The modules that a launch's processes have imported at their end, by rank, and those of their launcher."""
    place.write("sitecustomize.py", SEEN)
    modules = place.folder / "modules"
    modules.mkdir()
    env = environment(MODULES=str(modules))
    env["PYTHONPATH"] += f":{place.folder}"
    code, output = run(by_finetune(config, str(place.recipe(**sections))), env=env)
    assert code == 0, output
    assert "Error" not in output
    assert json.loads((place.folder / "run" / "run.json").read_text())["runs"]["kind"] == config
    found = {file.name: set(file.read_text().splitlines()) for file in modules.iterdir()}
    assert set(found) == {"0", "1", "launcher"}
    return found


def test_a_plain_run_imports_what_it_needs(place: Place) -> None:
    found = imported(place, "fsdp")
    for modules in found.values():
        assert not modules & LIBRARIES
    # Once for all: a rank itself imports what recipe and launch file ask for.
    own = found["0"] - found["launcher"]
    assert {name for name in own if name.startswith("finetune.")} == {
        "finetune.distributed.strategies.fsdp",
        "finetune.utils.compat.torch_sharding_private",
    }
    assert len(own) < 60, own


def test_adapters_import_peft_alone(place: Place) -> None:
    found = imported(place, "ddp", lora={"rank": 2})
    assert found["0"] & LIBRARIES == found["1"] & LIBRARIES == {"peft"}
    assert not found["launcher"] & LIBRARIES


def test_help_imports_no_library() -> None:
    code = (
        "import sys\nfrom finetune.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: print('\\n'.join(sys.modules))"
    )
    code, output = run([sys.executable, "-c", code])
    assert code == 0, output
    assert not set(output.splitlines()) & {"torch", "transformers", "accelerate", "numpy", "pydantic", "yaml", "rich"}


def test_a_plan_imports_peft_alone() -> None:
    code = (
        "import sys\nfrom finetune.cli.main import main\n"
        "assert main(['plan', 'sample', '--json']) == 0\nprint('\\n'.join(sys.modules))"
    )
    code, output = run([sys.executable, "-c", code])
    assert code == 0, output
    assert set(output.splitlines()) & LIBRARIES == {"peft"}


WORKER = """
import os, signal, sys, threading, time
from pathlib import Path
import psutil
rank, folder = os.environ["RANK"], Path(sys.argv[1])
facts = [
    os.getsid(0) == os.getpid(),
    signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
    threading.active_count() == 1,
    not psutil.Process().net_connections("inet"),
    os.environ["OMP_NUM_THREADS"] == "1",
    __name__ == "__main__",
    sys.argv[1:] == [str(folder)],
]
(folder / rank).write_text(f"{facts}")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
(folder / f"ready{rank}").touch()
time.sleep(600)
"""


@pytest.mark.parametrize("config", ["ddp", "zero1"])
def test_a_fork_has_what_a_new_process_has(place: Place, config: str) -> None:
    """A session of its own, default signals, no thread or connection of its launcher; SIGTERM reaches it."""
    place.write("worker.py", WORKER)
    env = environment()
    env["PYTHONPATH"] += f":{place.folder}"
    del env["OMP_NUM_THREADS"]
    words = by_launcher(config, str(place.folder), module="worker")
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    process = subprocess.Popen(words, cwd=ROOT, env=env, **pipes, start_new_session=True)
    try:
        wait_for(process, place.folder / "ready0", place.folder / "ready1")
        for rank in "01":
            assert "False" not in (place.folder / rank).read_text()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
        assert process.returncode == 75, "as its workers ended"
        assert b"OMP_NUM_THREADS" not in errors, "workers set their own number: torchrun need not warn"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(process: subprocess.Popen[bytes], *files: Path) -> None:
    until(lambda: all(file.exists() for file in files) or process.poll() is not None, RUN_S, "no worker has started")
    assert process.poll() is None, "the launcher has ended"

"""What a command says when a signal ends it, output that nobody reads, and temporary folders."""

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forkserver import until
from harness import RUN_S, environment
from ranks import MODEL, Place, by_finetune
from terminal import Terminal

from finetune.monitoring.shutdown import ShutdownHandler
from finetune.utils import temporary_folders
from finetune.utils.temporary_folders import temporary_folder

# Python imports it when it starts. The process sends itself a signal when a module is looked for.
STRUCK = """
import os, sys
class Strike:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STRIKE"] and os.environ.get("STRUCK") != "yes":
            os.environ["STRUCK"] = "yes"
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
sys.meta_path.insert(0, Strike())
"""


def struck(place: Place, module: str, number: int, words: list[str]) -> subprocess.CompletedProcess[str]:
    place.write("sitecustomize.py", STRUCK)
    env = environment(STRIKE=module, NUMBER=str(number), TMPDIR=str(place.folder))
    env["PYTHONPATH"] += f":{place.folder}"
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=RUN_S, check=False)


@pytest.mark.parametrize(
    ("module", "number"),
    [
        ("finetune.cli.completion", signal.SIGINT),
        ("finetune.config.recipe", signal.SIGINT),
        ("finetune.distributed.launch.predicted_environment", signal.SIGINT),
        ("accelerate", signal.SIGINT),
        ("finetune.training.build_run", signal.SIGINT),
        ("torch.distributed.elastic.multiprocessing.errors", signal.SIGINT),
        ("torch", signal.SIGTERM),
        ("torch", signal.SIGHUP),
    ],
)
def test_a_launch_that_is_interrupted_as_it_imports_says_so_in_one_line(
    place: Place, module: str, number: signal.Signals
) -> None:
    place.write("train.jsonl", '{"text": "x"}\n')
    done = struck(place, module, number, by_finetune("ddp", str(place.recipe())))
    name = "Ctrl-C" if number == signal.SIGINT else number.name
    assert (done.returncode, done.stderr, done.stdout) == (128 + number, f"\nStopped by {name}.\n", "")
    assert [path for path in place.folder.iterdir() if path.name.startswith("finetune-")] == []


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("transformers", ["generate", str(MODEL), "--prompt", "x"]),
        ("finetune.planning.plan_report", ["plan", "sample"]),
        ("finetune.data.prepare", ["data", "sample"]),
    ],
)
def test_so_does_every_command(place: Place, module: str, words: list[str]) -> None:
    done = struck(place, module, signal.SIGINT, [sys.executable, "-m", "finetune", *words])
    lines = done.stderr.splitlines()
    assert (done.returncode, lines[-2:]) == (130, ["", "Stopped by Ctrl-C."])
    assert all(line.startswith("Opening ") for line in lines[:-2])


def test_ctrl_c_while_data_is_prepared_says_what_is_kept(place: Place) -> None:
    text = "Once upon a time there was a cat. " * 100
    place.write("train.jsonl", "".join(json.dumps({"text": f"{number} {text}"}) + "\n" for number in range(30_000)))
    recipe = str(place.recipe())
    with Terminal(by_finetune("ddp", recipe), env=environment()) as terminal:
        terminal.wait_for("/s")
        assert "tokenising" in terminal.output
        terminal.press_ctrl_c()
        assert terminal.end() == 130, terminal.output
    # Either rank prepares, and the bar of one may be drawn behind what the other says.
    said = terminal.output[terminal.output.index("Stopped by") :].splitlines()[0]
    kept = place.folder / "cache"
    assert said.startswith(f"Stopped by Ctrl-C. The parts of the data that were finished are kept in {kept}")
    assert said.endswith(". No step was taken yet: the same command starts again.")
    assert "Traceback" not in terminal.output
    assert terminal.output.count("Stopped by") == 1


PRINTS = """
import os, sys
from finetune.utils.signals import outlive_readers
outlive_readers()
os.read(int(sys.argv[1]), 1)
for stream in (sys.stdout, sys.stderr):
    print("nobody reads this", file=stream, flush=True)
from rich.console import Console
Console(stderr=True).print("nor this")
open(sys.argv[2], "w").close()
"""


@pytest.mark.parametrize("kind", ["terminal", "pipe", "full"])
def test_what_prints_into_nothing_goes_on(tmp_path: Path, kind: str) -> None:
    ours, theirs = pty.openpty() if kind == "terminal" else os.pipe()
    if kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), theirs)
    told, tells = os.pipe()
    words = [sys.executable, "-c", PRINTS, str(told), str(tmp_path / "end")]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment(), pass_fds=[told])
    os.close(theirs)
    os.close(ours)
    os.write(tells, b"x")
    assert process.wait(RUN_S) == 0
    assert (tmp_path / "end").exists()


HOLDS = """
import signal
from finetune.utils.temporary_folders import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    signal.pause()
"""


def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temporary_folders.tempfile, "tempdir", str(tmp_path))
    env = environment(TMPDIR=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    theirs = Path(process.stdout.readline().strip())
    assert theirs.parent == tmp_path
    with temporary_folder() as ours:
        assert ours.is_dir()
        assert theirs.is_dir(), "its process is at work"
        process.kill()
        process.wait()
        with temporary_folder() as other:
            assert other != ours
            assert ours.is_dir()
            assert not theirs.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("newest", [None, Path("runs/run/checkpoints/step-00000012")])
def test_what_stays_when_the_grace_is_over_is_said(
    newest: Path | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    handler = ShutdownHandler(0.0, lambda: newest, lambda: None)
    with handler.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        until(lambda: bool(codes), 60, "the grace never ended")
    assert codes == [128 + signal.SIGHUP]
    said = capfd.readouterr().err
    assert (f"{newest} stays." in said) == (newest is not None)
    assert ("there is no checkpoint" in said) == (newest is None)


def test_hangups_that_are_ignored_stay_ignored() -> None:
    heard: list[Any] = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handler = ShutdownHandler(1000.0, lambda: None, lambda: None)
        with handler.listening():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            heard.append(handler.reason)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert heard == [None]


SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


def test_an_import_cannot_swallow_it(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    verb = "def verb():\n    import swallows\n    print('went on')"
    for opening in ("import finetune.cli", "from finetune.utils.exit_codes import run_guarded"):
        body = "import swallows" if "cli" in opening else "sys.exit(run_guarded(verb))"
        code = f"import sys\n{opening}\n{verb}\n{body}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "\nStopped by Ctrl-C.\n")


def test_one_that_was_held_back_until_it_is_handled(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from finetune.utils.exit_codes import run_guarded
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(run_guarded(lambda: print("went on")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "\nStopped by SIGTERM.\n")

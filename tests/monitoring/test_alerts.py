"""Alerts: a command or a webhook is told of each event of a run, and no failure to send one changes the run."""

import json
import math
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from forkserver import until
from harness import LIMIT_S, WAIT_S
from inside import Done, alone, at_step, mlp, run_here, stop_after

from finetune.cli import main
from finetune.config.recipe import load_recipe, validate_recipe
from finetune.config.recipe_schema import GuardSection
from finetune.diagnostics.parity.launch_runs import find_launches, write_recipes
from finetune.distributed.launch.launcher import FailureAlert
from finetune.monitoring import alerts
from finetune.training import api, entry_point, finish_run
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import CheckpointError, DivergedError, RecipeError
from finetune.utils.exit_codes import ALERTED

TOKEN = "T0SECRET"


class Webhook:
    """A server that keeps what is posted to it, and answers as it is told to."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.code, self.answers = 200, threading.Event()
        self.answers.set()
        webhook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.messages.append(json.loads(body, parse_constant=lambda name: pytest.fail(name)))
                webhook.headers.append(dict(self.headers))
                webhook.answers.wait()
                self.send_response(webhook.code)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/services/{TOKEN}"

    @property
    def events(self) -> list[str]:
        return [message["event"] for message in self.messages]


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    served = Webhook()
    monkeypatch.setenv("CHAT_URL", served.url)
    yield served
    served.answers.set()
    served.server.shutdown()
    served.server.server_close()


GUARD = {"alert": "$CHAT_URL", "max_skipped_steps": 2}


def crash(run: BuiltRun) -> None:
    raise ValueError("a bug of a task\nin two lines")


def full_disk(step: int, *, stays: bool) -> Callable[[BuiltRun], None]:
    """A run whose checkpoints cannot be written from a step on, for a while or for good."""

    def meddle(run: BuiltRun) -> None:
        saver = run.checkpoints._saver
        write = saver._write

        def fail() -> None:
            if saver._step == step or (stays and saver._step > step):  # type: ignore[operator]
                raise OSError(28, "No space left on device")
            write()

        saver._write = fail  # type: ignore[method-assign]

    return meddle


# ---------------------------------------------------------------- events


def test_the_end_of_a_run(webhook: Webhook, tmp_path: Path) -> None:
    done = run_here(mlp(tmp_path / "run", guard=GUARD))
    [message] = webhook.messages
    said = f"{tmp_path}/run on {message['host']}: finished. This run ended at step 20; train loss "
    assert message["text"].startswith(said)
    assert message["content"] == message["text"]  # as Discord has it
    assert {**message, "text": "", "content": "", "host": ""} == {
        "run": str(tmp_path / "run"),
        "step": 20,
        "num_steps": 20,
        "train_loss": done.results["train_loss"],
        "validation_loss": done.results["validation_loss"],
        **dict.fromkeys(("text", "content", "host"), ""),
        "event": "finished",
    }
    assert webhook.headers[0]["Content-Type"] == "application/json"
    assert webhook.headers[0]["User-Agent"] == "finetune"
    # Started again there is nothing to tell.
    assert "Nothing is left to do" in run_here(mlp(tmp_path / "run", guard=GUARD)).said
    assert webhook.events == ["finished"]


def test_a_run_that_is_stopped(webhook: Webhook, tmp_path: Path) -> None:
    done = run_here(mlp(tmp_path / "run", guard=GUARD), stop_after(7))
    assert webhook.events == ["stopped"]
    said = webhook.messages[0]["text"].partition("stopped. ")[2]
    assert said.startswith("Stopped at step 7 of 20 (a test), saved in ")
    assert said in done.said
    run_here(mlp(tmp_path / "run", guard=GUARD))
    assert webhook.events == ["stopped", "finished"]


def test_a_run_that_diverges(webhook: Webhook, tmp_path: Path) -> None:
    with pytest.raises(DivergedError) as caught:
        run_here(mlp(tmp_path / "run", guard=GUARD, optim={"name": "SGD", "lr": 1e30, "clip_norm": None}))
    assert webhook.events == ["diverged"]
    assert webhook.messages[0]["text"].endswith(f"diverged. {caught.value}")


def test_a_run_that_fails(webhook: Webhook, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug"):
        run_here(mlp(tmp_path / "run", guard=GUARD), at_step(6, crash))
    assert webhook.events == ["failed"]
    assert webhook.messages[0]["text"].endswith("failed. ValueError: a bug of a task in two lines")
    assert webhook.messages[0]["step"] == 6


def test_a_disk_that_is_full_for_a_while(webhook: Webhook, tmp_path: Path) -> None:
    done = run_here(mlp(tmp_path / "run", guard=GUARD), full_disk(10, stays=False))
    assert sorted(webhook.events) == ["finished", "write_failed"]
    [message] = [m for m in webhook.messages if m["event"] == "write_failed"]
    assert "write failed. The checkpoint of step 10 cannot be written: No space left on device" in message["text"]
    assert done.checkpoints == ["step-00000015", "step-00000020"]


def test_a_disk_that_stays_full(webhook: Webhook, tmp_path: Path) -> None:
    """Two checkpoints fail, which is told once; and that the run ends of it."""
    with pytest.raises(CheckpointError):
        run_here(mlp(tmp_path / "run", guard=GUARD), full_disk(10, stays=True))
    assert webhook.events == ["write_failed", "write_failed"]
    ended = [m["text"] for m in webhook.messages if "The checkpoint of step 20" in m["text"]]
    assert len(ended) == 1
    assert "Make room" in ended[0]


def test_metrics_that_cannot_be_written(webhook: Webhook, tmp_path: Path) -> None:
    def spoil(run: BuiltRun) -> None:
        file = run.directory.path / "metrics.jsonl"
        file.unlink()
        file.mkdir()

    run_here(mlp(tmp_path / "run", guard=GUARD), at_step(4, spoil))
    assert sorted(webhook.events) == ["finished", "write_failed"]


def test_only_what_is_asked_for_is_told(webhook: Webhook, tmp_path: Path) -> None:
    run_here(mlp(tmp_path / "run", guard={**GUARD, "alert_on": ["diverged"]}))
    assert webhook.messages == []
    assert "straggler" not in GuardSection().alert_on


def test_another_rank_tells_nothing(webhook: Webhook, tmp_path: Path) -> None:
    def elsewhere(run: BuiltRun) -> None:
        told = SimpleNamespace(**{**vars(run), "backend": SimpleNamespace(is_main=False)})
        with finish_run.alerts_at_end(told):  # type: ignore[arg-type]
            pass
        with pytest.raises(ValueError, match="a bug"), finish_run.alerts_at_end(told):  # type: ignore[arg-type]
            crash(run)
        assert webhook.messages == []

    run_here(mlp(tmp_path / "run", guard=GUARD), elsewhere)
    assert webhook.events == ["finished"]


def test_a_run_from_python(webhook: Webhook, tmp_path: Path) -> None:
    with alone():
        for step in api.start(mlp(tmp_path / "run", guard=GUARD), quiet=True).steps():
            if step.step == 3:
                break
        api.train(mlp(tmp_path / "run", guard=GUARD), quiet=True)
    assert webhook.events == ["stopped", "finished"]


def test_figures_that_json_lacks(webhook: Webhook) -> None:
    facts = {"run": "runs/x", "loss": math.nan, "late_s": 3.5, "size": np.float32(1)}
    alerts.send_alert(GuardSection(alert="$CHAT_URL"), "stalled", "Rank 3\nis behind.", facts, wait=True)
    [message] = webhook.messages
    assert message["loss"] is None
    assert message["late_s"] == 3.5
    assert message["text"].endswith(": stalled. Rank 3 is behind.")


# ---------------------------------------------------------------- commands


def write_script(folder: Path, text: str) -> Path:
    script = folder / "notify.sh"
    script.write_text(f"#!/bin/sh\ncd '{folder}'\n{text}\n")
    script.chmod(0o755)
    return script


def test_a_command(tmp_path: Path) -> None:
    script = write_script(tmp_path, 'cat > told.json; printf "%s\\n" "$FINETUNE_EVENT" "$FINETUNE_TEXT" "$1" > words')
    run_here(mlp(tmp_path / "run", guard={"alert": f"{script} 'two words'"}))
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["event"] == "finished"
    assert (tmp_path / "words").read_text() == f"finished\n{told['text']}\ntwo words\n"


def test_a_command_that_fails(tmp_path: Path) -> None:
    script = write_script(tmp_path, "echo first >&2; echo no route >&2; exit 3")
    done = run_here(mlp(tmp_path / "run", guard={"alert": str(script)}))
    assert f"guard.alert: 'finished' was not sent: {script} ended with exit code 3: no route." in done.said
    assert "finished" in done.facts


def test_a_command_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, with what it has started."""
    written = tmp_path / "child"

    class Popen(subprocess.Popen[Any]):
        """Its time is over once its child runs."""

        def communicate(self, *words: Any, **options: Any) -> Any:
            until(written.exists, WAIT_S, "its child was not started")
            return super().communicate(*words, **options)

    monkeypatch.setattr(alerts, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": Popen}))
    monkeypatch.setattr(alerts, "_TIMEOUT_S", 0.1)
    monkeypatch.setattr(alerts, "_PATIENCE_S", LIMIT_S)
    script = write_script(tmp_path, "sleep 1000 & echo $! > new; mv new child; wait")
    done = run_here(mlp(tmp_path / "run", guard={"alert": str(script)}))
    assert f"was not sent: {script} has not ended within 0.1 s. The run does not depend on it." in done.said
    child = Path("/proc", written.read_text().strip(), "stat")
    until(lambda: not child.exists() or child.read_text().split()[2] == "Z", WAIT_S, "its child is killed")


# ---------------------------------------------------------------- failures to send


def whole(done: Done, calm: Done) -> bool:
    return done.losses == calm.losses and "finished" in done.facts and done.checkpoints == calm.checkpoints


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run_here(mlp(tmp_path_factory.mktemp("calm") / "run"))


@pytest.mark.parametrize("code", [302, 404, 500])
def test_a_webhook_that_refuses(webhook: Webhook, calm: Done, tmp_path: Path, code: int) -> None:
    webhook.code = code
    done = run_here(mlp(tmp_path / "run", guard=GUARD))
    assert f"guard.alert: 'finished' was not sent: the webhook answers {code} " in done.said
    assert len(webhook.messages) == 1  # a redirect is not followed
    assert TOKEN not in done.said
    assert whole(done, calm)


def test_a_webhook_that_does_not_answer(
    webhook: Webhook, calm: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhook.answers.clear()
    monkeypatch.setattr(alerts, "_TIMEOUT_S", 0.2)
    done = run_here(mlp(tmp_path / "run", guard=GUARD))
    assert done.said.count("guard.alert: 'finished' was not sent: timed out") == 1
    assert whole(done, calm)


def test_whoever_waits_waits_within_a_bound(webhook: Webhook, capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is not resolved, or bytes that trickle in, are no time-out of a socket."""
    webhook.answers.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alerts, "_PATIENCE_S", 0.2)
        alerts.send_alert(GuardSection(alert="$CHAT_URL"), "failed", "x", {"run": "bound"}, wait=True)
    assert "'failed' was not sent: nothing answered within 0.2 s" in capsys.readouterr().err


def test_who_does_not_wait_goes_on_at_once(webhook: Webhook) -> None:
    guard = GuardSection(alert="$CHAT_URL", alert_on=("straggler", "finished"))
    webhook.answers.clear()
    for _ in range(3):
        alerts.send_alert(guard, "straggler", "Rank 1 is late.", {"run": "at once"})  # returns with none answered
    webhook.answers.set()
    alerts.send_alert(guard, "finished", "x", {"run": "at once"}, wait=True)
    assert sorted(webhook.events) == ["finished", "straggler"]


@pytest.mark.parametrize("fails", ["thread", "url"])
def test_nothing_is_raised(fails: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"https://chat/{TOKEN}")

    monkeypatch.setenv("CHAT_URL", f"http://[::1/{TOKEN}")
    if fails == "thread":
        monkeypatch.setattr(alerts.threading, "Thread", fail)
    alerts.send_alert(GuardSection(alert="$CHAT_URL"), "failed", "x", {}, wait=True)
    said = capsys.readouterr().err
    assert said.count("guard.alert: 'failed' was not sent") == 1
    assert TOKEN not in said


def test_a_request_to_stop_while_the_last_alert_is_sent(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is saved: the grace period that ends meanwhile does not end the process with another code."""
    ended: list[int] = []
    monkeypatch.setattr("finetune.monitoring.shutdown.os._exit", ended.append)
    send = alerts._send

    def slow(*words: Any) -> None:
        handler[0]._end(143)
        send(*words)

    handler: list[Any] = []
    monkeypatch.setattr(alerts, "_send", slow)
    run_here(mlp(tmp_path / "run", guard=GUARD), lambda run: handler.append(run.shutdown))
    assert webhook.events == ["finished"]
    assert ended == []


def test_runs_that_are_compared_tell_nobody(tmp_path: Path) -> None:
    recipe = validate_recipe(mlp(tmp_path / "run", guard=GUARD))
    written = write_recipes(recipe, find_launches("single,ddp"), tmp_path, steps=1, shrink=False)
    assert [load_recipe(file).guard for file in written.values()] == [GuardSection(max_skipped_steps=2)] * 2


def test_a_launch_that_fails_before_rank_0_can_tell(
    webhook: Webhook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launcher tells in its place, and only then."""
    monkeypatch.setenv(ALERTED, "")  # which the launcher sets
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(mlp(tmp_path / "run", guard=GUARD)))
    alert = FailureAlert("finetune.training", ["--quiet", str(recipe), "length.steps=3"], tmp_path)
    alert.send("The worker of rank 0 was ended by SIGKILL.")
    (message,) = webhook.messages
    assert message["event"] == "failed"
    assert message["run"] == str(tmp_path / "run")
    assert "The worker of rank 0 was ended by SIGKILL." in message["text"]
    (tmp_path / "alerted").unlink()
    # As rank 0 does.
    guard = GuardSection.model_validate(GUARD)
    alerts.send_alert(guard, "failed", "a bug", {}, wait=True)
    alert.send("told already")
    alert.workers_ended()
    alert.send("told already")
    # Workers that were started again.
    alert.workers_ended()
    alert.send("failed again")
    assert len(webhook.messages) == 3
    assert "failed again" in webhook.messages[-1]["text"]
    FailureAlert("json", [], tmp_path / "other").send("its package has nothing to tell")
    FailureAlert(None, [], tmp_path / "other").send("a script")
    quiet = FailureAlert("finetune.training", [str(recipe), "guard.alert=null"], tmp_path / "other")
    quiet.send("nobody asked")
    assert len(webhook.messages) == 3
    capsys.readouterr()
    recipe.unlink()
    FailureAlert("finetune.training", [str(recipe)], tmp_path / "other").send("its recipe is gone")
    said = capsys.readouterr().err
    assert said.startswith(f"guard.alert: 'failed' was not sent: Cannot read the recipe {recipe}")
    assert said.count("\n") == 1


# ---------------------------------------------------------------- secrets


def test_the_url_is_nowhere(webhook: Webhook, tmp_path: Path) -> None:
    tree = mlp(tmp_path / "run", guard=GUARD, log={"trackers": ["tensorboard"]})
    with pytest.raises(ValueError, match="a bug"):
        run_here(tree, at_step(12, crash))
    webhook.code = 500
    done = run_here(tree)
    assert webhook.events == ["failed", "finished"]
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert len(files) > 10
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]
    assert TOKEN not in done.said


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("alert", "says"),
    [
        (f"https://hooks.example/{TOKEN}", "a webhook's URL is a secret"),
        (f"curl -d @- https://hooks.example/{TOKEN}", "a webhook's URL is a secret"),
        (["curl", f"https://hooks.example/{TOKEN}"], "write a command as one text"),
        (f"$CHAT/{TOKEN}", "write an environment variable as `$NAME`, alone"),
        ("$", "write an environment variable"),
        ("mail 'me", "cannot be split into words: no closing quotation"),
        ("  ", "write a command as one text"),
        (7, "write a command as one text"),
    ],
)
def test_a_recipe_that_is_refused(alert: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecipeError, match=r"guard\.alert: ") as caught:
        validate_recipe(mlp(tmp_path / "run", guard={"alert": alert}))
    assert says in str(caught.value)
    assert TOKEN not in str(caught.value)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(mlp(tmp_path / "run")))
    # Nor what was typed, which others may read in a log.
    for override in (f"guard.alert={json.dumps(alert)}", f"guard={json.dumps({'alert': alert})}"):
        assert main.main(["show", str(file), override]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert TOKEN not in said


def test_events_that_are_refused(tmp_path: Path) -> None:
    for events, says in (([], "at least 1 item"), (["dead"], "'finished', 'stopped', 'failed', 'diverged'")):
        with pytest.raises(RecipeError, match=says):
            validate_recipe(mlp(tmp_path / "run", guard={"alert": "true", "alert_on": events}))


@pytest.mark.parametrize(
    ("alert", "url", "says"),
    [
        ("no-such-command -x", None, "there is no command no-such-command that can be run here"),
        ("./notify.sh", None, "there is no command ./notify.sh"),
        ("$CHAT_URL", None, "CHAT_URL is not set in the environment of rank 0"),
        ("$CHAT_URL", "", "CHAT_URL is not set"),
        ("$CHAT_URL", TOKEN, "CHAT_URL holds no URL of a webhook"),
        ("$CHAT_URL", f"file:///{TOKEN}", "CHAT_URL holds no URL"),
        ("$CHAT_URL", f"https://me:{TOKEN}@host/x", "CHAT_URL holds no URL"),
        ("$CHAT_URL", f"https://host:{TOKEN}/x", "CHAT_URL holds no URL"),
        ("$CHAT_URL", f"https://host/{TOKEN} x", "CHAT_URL holds no URL"),
        ("$CHAT_URL", f"http://[::1/{TOKEN}", "CHAT_URL holds no URL"),
        ("$CHAT_URL", f"https:///{TOKEN}", "CHAT_URL holds no URL"),
    ],
)
@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_what_a_run_and_a_dry_run_refuse(
    alert: str,
    url: str | None,
    says: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CHAT_URL", raising=False)
    if url is not None:
        monkeypatch.setenv("CHAT_URL", url)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(mlp(tmp_path / "run", guard={"alert": alert})))
    with alone():
        assert entry_point.train_main([str(file), *words]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("Error: guard.alert: ")
    assert says in said
    assert "\n" not in said
    assert TOKEN not in said
    assert not (tmp_path / "run").exists()


def test_other_ranks_need_neither_variable_nor_command() -> None:
    for alert in ("$NO_SUCH_VARIABLE", "no-such-command"):
        alerts.check_alert(GuardSection(alert=alert), {"RANK": "1"})
        with pytest.raises(RecipeError):
            alerts.check_alert(GuardSection(alert=alert), {"RANK": "0"})

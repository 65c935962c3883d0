"""Code that a run's directory leads to runs where this user started the run on this machine, or says so."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from inside import alone, copy, mlp, run_here
from ranks import CONFIG, MODEL, lines

from finetune.checkpoint import trusted_code
from finetune.checkpoint.run_history import read_run
from finetune.cli import main
from finetune.config.recipe import RECIPE_FIELDS, load_recipe
from finetune.config.recipe_schema import NAMES_OF_CODE
from finetune.diagnostics.run_report.run_summary import predict_peak
from finetune.training.api import Run
from finetune.utils.errors import RecipeError

NAMED = """
from pathlib import Path
Path({ran!r}).touch()
from finetune.optim.optimizers import LARS as Optimizer
from finetune.tasks.causal_lm import CAUSAL_LM
task, loss = CAUSAL_LM, CAUSAL_LM.loss_sum
"""

SHIPPED = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({ran!r}).touch()
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""

AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, with a home of its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text(lines(60))
    return tmp_path


def train(home: Path, **sections: Any) -> Path:
    """A run of this user's, with a checkpoint at its end."""
    data = {"train": [{"path": str(home / "train.jsonl")}], "validation_fraction": 0.0, "sequence_length": 32}
    tree = {
        "model": {"config": CONFIG},
        "tokenizer": {"name": str(MODEL)},
        "data": {**data, "cache_dir": str(home / "cache"), "num_workers": 1},
        "batch": {"global_size": 4, "micro_size": 2},
        "length": {"steps": 2},
        "output": {"dir": str(home / "run")},
        "precision": "fp32",
    }
    return run_here({**tree, **sections}).directory


def write_code(file: Path, text: str) -> Path:
    """A file with code, and the file that it writes when it runs."""
    ran = file.with_suffix(".ran")
    file.write_text(text.format(ran=str(ran)))
    return ran


def change_recipe(run: Path, **sections: dict[str, Any]) -> None:
    tree = yaml.safe_load((run / "recipe.yaml").read_text())
    for section, values in sections.items():
        tree[section] |= values
    (run / "recipe.yaml").write_text(yaml.safe_dump(tree))


def ship_code(folder: Path, text: str = SHIPPED) -> Path:
    """Puts code beside weights, as models on the hub have it."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": AUTO_MAP}))
    return write_code(folder / "own.py", text)


def end(*words: str) -> int:
    with alone():
        return main.main(list(words))


GENERATE = ("generate", "run", "--prompt", "Once", "--max-new-tokens", "2")
EVAL = ("eval", "run", "--data", "train.jsonl")
EXPORT = ("export", "run", "--as", "merged")
REPLAY = ("replay", "run", "--step", "1")


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (EXPORT, {"task": {"loss": "evil.py:loss"}}),
        (EXPORT, {"task": {"name": "evil.py:task"}}),
        (GENERATE, {"task": {"name": "evil.py:task"}}),
        (EVAL, {"task": {"name": "evil.py:task"}}),
        (REPLAY, {"task": {"loss": "evil.py:loss"}}),
        (REPLAY, {"task": {"name": "evil.py:task"}}),
        (REPLAY, {"task": {"name": "evil:task"}}),
        (REPLAY, {"optim": {"name": "evil.py:Optimizer"}}),
    ],
)
def test_code_that_a_downloaded_recipe_names_runs_only_where_the_user_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], change: dict[str, Any]
) -> None:
    run, ran = train(home), write_code(home / "evil.py", NAMED)
    change_recipe(run, **change)
    [(section, value)] = change.items()
    [(key, name)] = value.items()
    assert end(*words) == 2
    assert not ran.exists()
    said = capsys.readouterr().err
    assert f"run/recipe.yaml says {section}.{key}: {name}" in said
    assert "--trust-remote-code" in said
    # What the run computes is another matter.
    if name.endswith((".py:loss", ".py:Optimizer")) or words != REPLAY:
        end(*words, "--trust-remote-code")
        assert ran.exists()


@pytest.mark.parametrize("words", [GENERATE, EVAL])
def test_code_that_is_not_needed_stands_in_nobodys_way(home: Path, words: tuple[str, ...]) -> None:
    run, ran = train(home), write_code(home / "evil.py", NAMED)
    change_recipe(
        run,
        task={"loss": "evil.py:loss"},
        optim={"name": "evil.py:Optimizer"},
    )
    assert end(*words) == 0
    assert not ran.exists()


@pytest.mark.parametrize("words", [GENERATE, EVAL, EXPORT, REPLAY])
def test_code_that_a_downloaded_run_ships_runs_only_where_the_user_says_so(
    home: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    run = train(home)
    shutil.rmtree(run / "checkpoints")  # a finished run that somebody has published
    ran = ship_code(run / "model")
    change_recipe(run, model={"trust_remote_code": True, "config": None, "name": str(run / "model")})
    assert end(*words) == 2
    assert not ran.exists()
    said = capsys.readouterr().err
    assert "run/recipe.yaml says model.trust_remote_code: true" in said
    assert "--trust-remote-code" in said
    end(*words, "--trust-remote-code")
    assert ran.exists()


def test_a_report_of_a_downloaded_run_runs_none_of_its_code(home: Path) -> None:
    run = train(home)
    for name, change in {
        "named": {"task": {"name": "evil.py:task"}},
        "shipped": {"model": {"trust_remote_code": True, "config": None, "name": str(run / "model")}},
    }.items():
        place = copy(run, home / name)
        ran = ship_code(run / "model") if name == "shipped" else write_code(home / "evil.py", NAMED)
        change_recipe(place, **change)
        history = read_run(place)
        said = predict_peak(dataclasses.replace(history, facts={**history.facts, "peak_memory": None}))
        assert isinstance(said, str)
        assert f"finetune plan {place}/recipe.yaml" in said
        assert not ran.exists()


def test_a_command_that_is_told_of_a_run_is_no_part_of_what_comes_after(home: Path) -> None:
    """Nor must it be there."""
    run = train(home)
    for command in ("no-such-command", "$NO_SUCH_VARIABLE", f"touch {home}/told"):
        change_recipe(run, guard={"alert": command})
        assert end(*REPLAY) == 0, command
    assert end(*GENERATE) == 0
    assert not (home / "told").exists()


def test_ones_own_run_needs_no_word_wherever_it_is_moved(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(MODEL, home / "base")
    ship_code(home / "base")
    write_code(home / "mine.py", NAMED)
    (home / "parts").mkdir()
    write_code(home / "parts" / "mine.py", NAMED)
    monkeypatch.setattr(sys, "path", list(sys.path))
    named = {"task": {"loss": "mine.py:loss"}, "optim": {"name": "parts.mine:Optimizer", "lr": 1e-3}}
    run = train(home, model={"name": str(home / "base"), "trust_remote_code": True}, tokenizer={}, **named)
    assert (run / "model" / "own.py").is_file()
    run.rename(home / "moved")
    for words in (GENERATE, EVAL, EXPORT, REPLAY):
        assert end(words[0], "moved", *words[2:]) == 0, words
    assert Run.open(home / "moved").load_model().step == 2
    shutil.rmtree(home / "moved" / "checkpoints")
    assert end(GENERATE[0], "moved", *GENERATE[2:]) == 0
    # To another user it is a download.
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "another"))
    for words in (GENERATE, EVAL, REPLAY):
        assert end(words[0], "moved", *words[2:]) == 2, words
    with pytest.raises(RecipeError, match="trust_remote_code=True"):
        Run.open(home / "moved").load_model()
    assert Run.open(home / "moved").load_model(trust_remote_code=True).step == 2


def test_a_signature_vouches_for_no_other_code(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user publishes can be changed by others, and come back."""
    shutil.copytree(MODEL, home / "base")
    ship_code(home / "base")
    write_code(home / "mine.py", NAMED)
    run = train(
        home,
        model={"name": str(home / "base"), "trust_remote_code": True},
        tokenizer={},
        task={"loss": "mine.py:loss"},
        checkpoint={"at_end": False},
    )
    changes: dict[str, Callable[[Path], Any]] = {
        "another file of that name": lambda place: ship_code(place / "model", SHIPPED + "\n"),
        "more code": lambda place: write_code(place / "model" / "more.py", SHIPPED),
        "the tokenizer's": lambda place: (place / "model" / "tokenizer_config.json").write_text(
            json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}})
        ),
        "another base": lambda place: change_recipe(place, model={"name": "somebody/else"}),
    }
    for name, change in changes.items():
        place = copy(run, home / name)
        change(place)
        with pytest.raises(RecipeError, match=r"model\.trust_remote_code"):
            Run.open(place).load_model()
    # The same name, counted from elsewhere.
    place = copy(run, home / "elsewhere")
    ran = write_code(place / "mine.py", NAMED)
    monkeypatch.chdir(place)
    with pytest.raises(RecipeError, match=r"task\.loss: mine\.py:loss"):
        check_recipe(place, ["task.loss"])
    assert not ran.exists()


def check_recipe(run: Path, keys: list[str]) -> None:
    trusted_code.check_code(run, load_recipe(run / "recipe.yaml"), keys)


def test_a_secret_that_is_not_ones_own_vouches_for_nothing(home: Path) -> None:
    run = run_here(mlp(home / "run")).directory
    key = home / "state" / "finetune" / "run-key"
    assert key.stat().st_mode & 0o777 == 0o600
    check_recipe(run, ["task.name"])
    secret = key.read_bytes()
    for spoil in (
        lambda: key.chmod(0o644),
        lambda: key.write_bytes(secret[:-1]),
        lambda: key.write_bytes(bytes(reversed(secret))),
        lambda: (key.rename(key.with_name("moved")), key.symlink_to("moved")),
        key.unlink,
    ):
        spoil()
        with pytest.raises(RecipeError, match=r"task\.name: own_task:mlp"):
            check_recipe(run, ["task.name"])
        key.unlink(missing_ok=True)
        key.with_name("moved").unlink(missing_ok=True)
        key.write_bytes(secret)
        key.chmod(0o600)
        check_recipe(run, ["task.name"])


def test_a_home_that_cannot_be_written_costs_the_signature_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    for state in (str(home / "file"), "/proc/none"):
        monkeypatch.setenv("XDG_STATE_HOME", state)
        run = run_here(mlp(home / "run", output={"overwrite": True, "dir": str(home / "run")})).directory
        assert "code" not in json.loads((run / "run.json").read_text())
        with pytest.raises(RecipeError, match=r"task\.name"):
            check_recipe(run, ["task.name"])


@pytest.mark.parametrize("code", ["text", [], {"task.name": "text"}, {"task.name": [1, None]}, 7])
def test_what_is_no_signature_vouches_for_nothing(home: Path, code: Any) -> None:
    run = run_here(mlp(home / "run")).directory
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**facts, "code": code}))
    with pytest.raises(RecipeError, match=r"task\.name"):
        check_recipe(run, ["task.name"])


def test_every_key_that_names_code_is_known() -> None:
    naming = {
        key
        for key, field in RECIPE_FIELDS.items()
        if "package.module" in (field.description or "") or key == "task.loss"
    }
    assert naming == set(NAMES_OF_CODE)


def test_a_resumed_run_keeps_its_signatures(home: Path) -> None:
    shutil.copytree(MODEL, home / "base")
    ship_code(home / "base")
    own = {"model": {"name": str(home / "base"), "trust_remote_code": True}, "tokenizer": {}}
    run = train(home, **own)
    before = json.loads((run / "run.json").read_text())["code"]
    assert len(before[trusted_code.SHIPPED]) == 2
    train(home, **own, length={"steps": 3})
    assert json.loads((run / "run.json").read_text())["code"] == before
    assert os.listdir(home / "state" / "finetune") == ["run-key"]

"""What is asked of the model hub: nothing where it cannot answer, and no library reports to anybody."""

import json
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, python

from finetune.cli import main, model_verbs
from finetune.training import entry_point
from finetune.utils import hub_access
from finetune.utils.errors import RecipeError


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails what gets as far as importing the libraries, which takes seconds."""

    def imported() -> None:
        raise AssertionError("the libraries were imported")

    for module in (model_verbs, entry_point):
        monkeypatch.setattr(module, "silence_libraries", imported)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "nope", "--prompt", "x"],
        ["eval", "nope", "--data", "constraints.txt"],
        ["generate", ".", "--base", "nope", "--prompt", "x"],
    ],
)
def test_a_model_that_cannot_be_had_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main.main(words) == 2
    said = capsys.readouterr().err
    assert "here is no folder 'nope', the hub's cache holds no model of that name, and the hub is not asked" in said
    assert ("--base: there" in said) == ("--base" in words)


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("key", ["model.name", "tokenizer.name"])
def test_a_recipes_model_that_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    other = "tokenizer.name=." if key == "model.name" else "model.config={model_type: llama}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {train: [{sample: 9}]}\nlength: {steps: 1}\nbatch: {global_size: 1, micro_size: 1}\n")
    for verb in ([], ["--dry-run"]):
        assert entry_point.train_main([str(recipe), f"{key}=nope", other, *verb]) == 2
        assert f"{key}: there is no folder 'nope'" in capsys.readouterr().err


def test_what_is_here_and_what_the_hub_may_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    hub_access.require_model(None)
    hub_access.require_model(str(tmp_path))
    (tmp_path / "hub/models--owner--name/snapshots/abc").mkdir(parents=True)
    hub_access.require_model("owner/name")
    with pytest.raises(RecipeError, match="here is no folder a/b/c, and models on the hub are named OWNER/NAME"):
        hub_access.require_model("a/b/c")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(hub_access, "why_unreachable", lambda env: None)
    hub_access.require_model("nope")  # the hub will say


@pytest.mark.parametrize("proxy", [None, "http://127.0.0.1:1"])
def test_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch, proxy: str | None) -> None:
    for variable in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(variable, raising=False)
    env = {"HF_ENDPOINT": "https://127.0.0.1:1"}
    if proxy is not None:
        monkeypatch.setenv("https_proxy", proxy)
        env = {"HF_ENDPOINT": "https://hub.invalid", "https_proxy": proxy}
    problem = hub_access.why_unreachable(env)
    assert problem is not None
    assert ("through the proxy" in problem) == (proxy is not None)


PROBE = """
import json, os, runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    if sys.argv[0] == "scripts/train.py":
        runpy.run_path("scripts/train.py", run_name="__main__")
    else:
        from finetune.cli.main import main
        main([sys.argv[0], "--help"])
except SystemExit:
    pass
early = sorted({"huggingface_hub", "transformers", "datasets", "accelerate"} & set(sys.modules))
import datasets, huggingface_hub
from huggingface_hub.utils import build_hf_headers
found = {
    "imported before": early,
    "telemetry": not huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY,
    "download counts": datasets.config.HF_UPDATE_DOWNLOAD_COUNTS,
    "names torch": "torch/" in build_hf_headers(token=False)["user-agent"],
    "variables": {n: os.environ.get(n) for n in ("DO_NOT_TRACK", "GRADIO_ANALYTICS_ENABLED", "WANDB_ERROR_REPORTING")},
}
print("\\n" + json.dumps(found))
"""


@pytest.mark.parametrize("entry", ["scripts/train.py", "generate"])
def test_no_library_reports(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """All verbs come in by one of two doors, and libraries read their switches when they are imported."""
    monkeypatch.chdir(ROOT)
    for variable in ("DO_NOT_TRACK", "HF_HUB_DISABLE_TELEMETRY", "DISABLE_TELEMETRY", "HF_UPDATE_DOWNLOAD_COUNTS"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("GRADIO_ANALYTICS_ENABLED", "WANDB_ERROR_REPORTING"):
        monkeypatch.delenv(variable, raising=False)
    found: dict[str, Any] = json.loads(python("-c", PROBE, entry)[0].splitlines()[-1])
    assert found == {
        "imported before": [],
        "telemetry": False,
        "download counts": False,
        "names torch": False,
        "variables": {"DO_NOT_TRACK": "1", "GRADIO_ANALYTICS_ENABLED": "False", "WANDB_ERROR_REPORTING": "false"},
    }

"""What recipe, command and launch file alone tell is refused before torch is imported, which takes most of a start."""

import json
import sys
from pathlib import Path

import pytest
import testdata
from harness import ROOT, environment, run

from finetune.cli import main, model_verbs
from finetune.utils.errors import RecipeError

# In one process: what is imported for one refusal would show at the next.
_PROGRAM = """
import json, sys
from finetune.cli import main
for words in json.loads(sys.argv[1]):
    code = main.main(words)
    print(json.dumps([code, "torch" in sys.modules]), flush=True)
"""


def test_refusals_import_no_torch(tmp_path: Path) -> None:
    """Each verb; not timed."""
    model, recipe, text = testdata.MODEL, str(ROOT / "recipes" / "sample.yaml"), tmp_path / "texts.txt"
    text.write_text("Once upon a time.\n")
    odd = ["--config_file", "ddp", "--num_processes", "3"]
    table, packed, unknown = tmp_path / "table.xlsx", tmp_path / "texts.jsonl.gz", tmp_path / "texts.pages"
    table.write_bytes(b"PK\x03\x04xl/")
    packed.write_bytes(b"\x1f\x8b")
    unknown.write_text("Once upon a time.\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "full" / "model").mkdir(parents=True)
    (tmp_path / "full" / "recipe.yaml").write_text("{data: {train: [{sample: 9}]}, length: {steps: 1}}")
    (tmp_path / "full" / "run.json").write_text('{"starts": [], "finished": ""}')
    refused = [
        ["train", recipe, "optim.lrr=1"],
        ["train", recipe, "length.steps=1", "length.epochs=1"],
        ["train", recipe, "--num_processes", "x"],
        ["train", recipe, "--machine_rank", "1"],
        ["train", recipe, *odd],
        ["train", recipe, *odd, "--dry-run"],
        ["train", recipe, "--config_file", "nonesuch"],
        ["launch", "--config_file", "ddp", recipe, "data.train=/nonesuch.txt"],
        ["launch", "--config_file", "ddp", recipe, "model.fp8=true", "precision=fp32"],
        ["launch", *odd, recipe],
        ["sft", "--model", "/nonesuch", "--data", str(text)],
        ["sft", "--model", model, "--data", "/nonesuch.txt"],
        ["sft", "--model", model, "--data", str(text), "optim.lrr=1", "data.train.0.label_field=x"],
        ["init", str(tmp_path / "new"), "--model", model, "--data", "/nonesuch.txt"],
        ["eval", "/nonesuch/x", "--data", str(text)],
        ["eval", model, "--data", "/nonesuch.txt"],
        ["eval", model, "--data", str(text), "--limit", "3"],
        ["generate", "/nonesuch/x", "--prompt", "a"],
        ["chat", "/nonesuch/x"],
        ["predict", "/nonesuch/x", str(text)],
        ["predict", model, "/nonesuch.txt"],
        ["export", "/nonesuch/x", "--as", "merged"],
        ["export", str(tmp_path / "run"), "--as", "merged"],
        ["export", str(tmp_path / "full"), "--as", "adapter"],
        ["generate", model, "--prompt", "a", "--temperature", "-1"],
        ["generate", model, "--prompt", "a", "--max-new-tokens", "0"],
        ["chat", model, "--top-p", "2"],
        ["plan", recipe, "optim.lrr=1"],
        ["plan", recipe, "--gpu", "nonesuch"],
        ["plan", recipe, "--configs", "/nonesuch"],
        ["plan", recipe, "--links", "/nonesuch"],
        ["plan", recipe, "--links", str(text)],
        ["explain", recipe, *odd],
        *(["data", recipe, f"data.train={file}"] for file in (table, packed, unknown)),
        ["train", recipe, f"data.train={unknown}"],
        ["eval", model, "--data", str(packed)],
        ["predict", model, str(table)],
        *(["doctor", "--recipe", recipe, f"data.train={path}", "--machines"] for path in ("/nonesuch.txt", unknown)),
    ]
    code, output = run([sys.executable, "-c", _PROGRAM, json.dumps(refused)], cwd=tmp_path, env=environment())
    assert code == 0, output[-3000:]
    found = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    expected = {" ".join(words): [1 if words[0] == "doctor" else 2, False] for words in refused}
    assert dict(zip(map(" ".join, refused), found, strict=True)) == expected
    assert f"FAILURE  recipe: {unknown} ends in '.pages', which is no format that can be read." in output


def test_gguf_is_gguf_f16(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def require(name: str, what: str, extra: str) -> None:
        raise RecipeError(f"{what} needs {name}")

    monkeypatch.setattr(model_verbs, "require_installed", require)
    assert main.main(["export", "runs/run", "--as", "gguf"]) == 2
    assert capsys.readouterr().err == "\nError: --as gguf-f16 needs gguf\n"

"""`make demo-qlora` and `make demo-dpo`, with a few steps of each stage: what they run, leave and say at the end."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from external_commands import needs
from harness import ROOT, commands, environment, run

SCRIPT = ROOT / "scripts" / "demo_qlora.sh"
DPO = ROOT / "scripts" / "demo_dpo.sh"


def small(folder: Path, python: str = sys.executable) -> dict[str, str]:
    overrides = f"data.cache_dir={folder / 'cache'} data.train.0.sample=150 length.steps=2 eval.every_steps=null"
    return environment(
        PATH=f"{commands(folder, python)}:{os.environ['PATH']}",
        RUNS=str(folder / "runs"),
        LAUNCH="accelerate_configs/single.yaml",
        PRETRAIN=f"{overrides} sample=null eval.at_end=false",
        TUNE=overrides,
        PREFER=overrides,
    )


@needs("bash")
def test_every_stage_runs(tmp_path: Path, quick_python: str) -> None:
    env = small(tmp_path, quick_python)
    code, output = run([str(SCRIPT), "Who is Nora?"], env=env)
    assert code == 0, output[-4000:]
    merged = tmp_path / "runs" / "demo_qlora" / "exports" / "merged"
    assert [line[4:6] for line in output.splitlines() if re.match(r"=== \d\.", line)] == ["1.", "2.", "3.", "4."]
    assert "Proved in a fresh process" in output
    assert "In training the base was quantised (nf4)" in output
    before, after = output.index("--- before"), output.index("--- after")
    assert 0 < before < after
    assert f"The merged model lies in {merged}" in output
    assert output.splitlines()[-1] == f"  finetune chat {merged}"
    # Answers end where stories do, and who opens the export finds the template.
    told = json.loads((merged / "generation_config.json").read_text())
    config = json.loads((merged / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|endoftext|>"
    assert told["eos_token_id"] == 0
    assert "Assistant:" in (merged / "chat_template.jinja").read_text()
    _prefers(tmp_path, env)


def _prefers(folder: Path, env: dict[str, str]) -> None:
    """Runs `make demo-dpo` on what is there."""
    after = folder / "runs" / "demo_dpo"
    code, output = run([str(DPO), "Who is Nora?"], env=env)
    assert code == 0, output[-4000:]
    assert [line[4:6] for line in output.splitlines() if re.match(r"=== \d\.", line)] == ["1.", "2.", "3.", "4."]
    assert "demo_qlora/exports/merged is there already" in output
    shares = re.search(r"the likelier one: ([0-9.]+) before, ([0-9.]+) after", output)
    assert shares is not None, output[-2000:]
    facts = [json.loads(line) for line in (after / "metrics.jsonl").read_text().splitlines()]
    measured = [line["validation_logps/accuracies"] for line in facts if "validation_logps/accuracies" in line]
    assert float(shares[2]) == measured[-1]
    assert 0 <= float(shares[1]) <= 1
    assert output.splitlines()[-1] == f"  finetune chat {after}"


@needs("bash")
def test_a_base_that_is_there_is_used_again(tmp_path: Path) -> None:
    model = tmp_path / "runs" / "sample" / "model"
    model.mkdir(parents=True)
    (model / "model.safetensors").touch()
    launcher = tmp_path / "other" / "accelerate"
    launcher.parent.mkdir()
    launcher.write_text('#!/bin/sh\necho "launched: $*"\nexit 3\n')
    launcher.chmod(0o755)
    env = small(tmp_path)
    code, output = run([str(SCRIPT)], env={**env, "PATH": f"{launcher.parent}:{env['PATH']}"})
    assert code == 3, "nothing goes on behind a stage that failed"
    assert f"{model} is there already" in output
    (launched,) = re.findall("^launched: .*", output, re.MULTILINE)
    assert "recipes/demo_qlora.yaml" in launched
    assert f"model.name={model}" in launched


@needs("make")
def test_the_target_runs_the_script() -> None:
    for target, script in (("demo-qlora", SCRIPT), ("demo-dpo", DPO)):
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        assert f"scripts/{script.name}" in plan

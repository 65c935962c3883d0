"""`finetune parity`: the same recipe under several launch configs, finished runs, and faults that must be caught."""

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from filelock import FileLock
from harness import ROOT, Launcher, Result, run
from recipes_for_tests import base
from safetensors.torch import load_file, save_file
from testdata import MODEL
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.cli import main
from finetune.config.recipe import dump_recipe, load_recipe, validate_recipe
from finetune.diagnostics.fault_injection import FAULTS
from finetune.diagnostics.parity import compare
from finetune.diagnostics.parity.compare import compare_runs, read_finished
from finetune.diagnostics.parity.launch_runs import find_launches, shrink_model, write_recipes
from finetune.utils.errors import BackendError, RecipeError

pytestmark = [
    pytest.mark.xdist_group("parity"),
]

STEPS = 5
WORDS = ["-m", "finetune", "parity"]


def small(**sections: Any) -> dict[str, Any]:
    # A document a row: micro-batches have unequal numbers of targets, which packing makes equal.
    data = {**base()["data"], "packing": "padded"}
    return base(data=data, length={"steps": STEPS}, eval={"at_end": False}, checkpoint={"at_end": False}, **sections)


@pytest.fixture(scope="module")
def launched(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], str, Path]:
    """A clean backend and a broken one beside the reference; exit code, JSON, what was said, and the folder."""
    folder = launcher.shared / "parity-verb"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "done.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            recipe = {**small(), "output": {"dir": str(folder / "never")}, "length": {"epochs": 3}}
            recipe["data"] = {"cache_dir": str(launcher.shared / "cache"), **recipe["data"]}
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
            options = ["--on", "single,ddp,fsdp", "--steps", str(STEPS), "--inject", "mean-of-means"]
            words = [*options, "--to", str(folder / "runs"), "--json", "data.num_workers=1"]
            code, output = run([sys.executable, *WORDS, str(folder / "recipe.yaml"), *words])
            (folder / "done.json").write_text(json.dumps([code, output]))
    code, output = json.loads((folder / "done.json").read_text())
    begin, end = output.find("\n{\n"), output.find("\n}\n")
    assert begin >= 0, output[-6000:]
    return code, json.loads(output[begin : end + 2]), output, folder / "runs"


def test_one_table_of_all_backends_and_a_broken_one_is_caught(launched: Any) -> None:
    code, found, output, folder = launched
    assert code == 1
    assert not found["holds"]
    assert found["reference"] == "single"
    assert list(found["runs"]) == ["single", "ddp", "fsdp"]
    for name, world in {"single": 1, "ddp": 2, "fsdp": 2}.items():
        one = found["runs"][name]
        assert one["runs"]["world_size"] == world
        assert [line["step"] for line in one["steps"]] == list(range(1, STEPS + 1))
        assert one["tokens_per_s"] > 0
        assert one["peak_memory_gib"] > 0
    clean, broken = found["comparisons"]["ddp"], found["comparisons"]["fsdp"]
    assert clean["holds"]
    assert clean["first"] is None
    assert clean["tensor"]["difference"] <= 1e-6
    assert max(clean["loss"], clean["grad_norm"]) <= 1e-6
    # The first step that differs, in what, and the tensor that is farthest away.
    assert re.match("step 1: (loss|grad_norm) is ", broken["first"])
    assert any(f"tensor {broken['tensor']['name']}" in reason for reason in broken["reasons"])
    assert "mean-of-means, which was caught" in output
    assert not (folder.parent / "never").exists()


def test_only_rank_0_reports(launched: Any) -> None:
    assert launched[2].count("launch    fsdp x 2 on cpu (gloo), fp32") == 1


def test_finished_runs_are_compared_alike(launched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = launched[3]
    assert main.main(["parity", str(folder / "single"), str(folder / "ddp")]) == 0
    said = capsys.readouterr().out
    assert "ddp: the path of single" in said
    assert main.main(["parity", str(folder / "single"), str(folder / "fsdp")]) == 1
    said = capsys.readouterr().out
    assert re.search("DRIFT: fsdp: step 1: (loss|grad_norm) is ", said)
    # A run is on its own path, whatever it is.
    assert main.main(["parity", str(folder / "fsdp"), str(folder / "fsdp")]) == 0


CAUGHT = {
    ("mean-of-means", "bf16"): "step 1: grad_norm",  # in fp32: launched above
    ("lost-rank", "fp32"): "step 1: the checksum of the rows",
    ("lost-rank", "bf16"): "step 1: the checksum of the rows",
    ("scheduler", "fp32"): "step 2: the learning rate",
    ("scheduler", "bf16"): "step 2: the learning rate",
    ("bf16-loss", "fp32"): "are rounded",
    ("bf16-loss", "bf16"): "are rounded",
    ("leaking-documents", "fp32"): "step 1: grad_norm",
    ("lost-targets", "fp32"): "step 1: loss",
    ("lost-sum", "fp32"): "Ranks have come to hold different values",
    ("wrong-norm", "fp32"): "step 1: grad_norm",
}
# Of rows or layers that are split over ranks.
SPLIT = {"leaking-documents": "sp", "lost-targets": "sp", "lost-sum": "tp", "wrong-norm": "tp"}
FAULTY = {
    f"{fault}+{precision}": small(precision=precision)
    for fault, precision in [("none", "fp32"), ("none", "bf16"), *CAUGHT]
    if fault not in SPLIT
}


PACKED = {**small(), "data": base()["data"]}
LAUNCHED_RUNS: dict[str, dict[str, Any]] = {
    "single": {"none+bf16": FAULTY["none+bf16"]},
    "ddp": FAULTY,
    **{
        config: {f"{fault}+fp32": PACKED for fault in ("none", *SPLIT) if SPLIT.get(fault, config) == config}
        for config in ("sp", "tp")
    },
}


@pytest.fixture(scope="module")
def faulty(launcher: Launcher) -> dict[str, Result]:
    return launcher.many("ddp", FAULTY)


@pytest.mark.parametrize(("fault", "precision"), CAUGHT)
def test_every_fault_is_caught(launcher: Launcher, faulty: dict[str, Result], fault: str, precision: str) -> None:
    if fault in SPLIT:
        faulty = launcher.many(SPLIT[fault], LAUNCHED_RUNS[SPLIT[fault]])
    if fault == "lost-sum":
        # The run itself sees that its ranks part.
        run = faulty[f"{fault}+{precision}"]
        assert run.code == 2
        assert CAUGHT[fault, precision] in run.output
        return
    good = read_finished(faulty[f"none+{precision}"].check().directory)
    bad = compare_runs(good, read_finished(faulty[f"{fault}+{precision}"].check().directory))
    assert not bad.holds
    assert any(CAUGHT[fault, precision] in reason for reason in bad.reasons), bad.reasons


def test_all_faults_are_tested() -> None:
    assert {fault for fault, _ in CAUGHT} == set(FAULTS)


def test_another_backend_in_bf16_is_on_the_path(launcher: Launcher, faulty: dict[str, Result]) -> None:
    single = launcher.many("single", LAUNCHED_RUNS["single"])["none+bf16"].check()
    found = compare_runs(read_finished(single.directory), read_finished(faulty["none+bf16"].directory))
    assert found.holds, found.reasons
    assert found.allowed.kind == "16 bit"


# What each change to the files of a run, all else equal, must be called.
CHANGES = {
    "loss": "step 3: loss",
    "grad_norm": "step 3: grad_norm",
    "lr": "step 3: the learning rate",
    "tokens": "step 3: targets so far",
    "not finite": "step 3: loss",
}


@pytest.fixture
def pair(launched: Any, tmp_path: Path) -> tuple[compare.FinishedRun, Path]:
    """A run, and a copy of it to spoil."""
    source = launched[3] / "single"
    return read_finished(source), Path(shutil.copytree(source, tmp_path / "copy"))


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_figure_is_named(pair: Any, what: str) -> None:
    one, copy = pair
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    if what == "not finite":
        lines[2]["loss"] = None
    else:
        lines[2][what] = lines[2][what] + 1 if what == "tokens" else lines[2][what] * 1.001
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = compare_runs(one, read_finished(copy))
    assert found.first is not None
    assert found.first.startswith(CHANGES[what])
    assert not found.holds
    # It is there at once, and has not grown.
    assert not any("rounding that grows" in note for note in found.notes)


@pytest.mark.parametrize(
    ("apart", "grows"),
    [
        ((0, 2e-6, 4e-5, 3e-4, 1e-5), True),
        ((2e-5, 3e-5, 4e-5, 3e-4, 1e-5), False),
        ((0, 0, 0, 3e-4, 3e-4), False),
        ((0, 1e-6, 2e-5, 9e-5, 0), False),
    ],
    ids=["grows", "differs from the start", "differs at once", "is close enough"],
)
def test_drift_that_grew_slowly_may_be_rounding(pair: Any, apart: tuple[float, ...], grows: bool) -> None:
    one = pair[0]
    other = {
        step: {**line, "grad_norm": line["grad_norm"] * (1 + far)}
        for (step, line), far in zip(one.steps.items(), apart, strict=True)
    }
    found = compare_runs(one, replace(one, steps=other))
    assert found.holds == (max(apart) <= found.allowed.norm)
    assert any("rounding that grows" in note for note in found.notes) == grows


@pytest.mark.parametrize(
    ("at", "tall", "loss", "said"),
    [(2, 2.0, 1e-4, True), (2, 1.0, 1e-4, False), (2, 2.0, 5e-3, False), (0, 2.0, 1e-4, False)],
    ids=["a spike", "no spike", "the loss too", "another step"],
)
def test_a_spike_in_16_bit_is_a_note(pair: Any, at: int, tall: float, loss: float, said: bool) -> None:
    facts = {**pair[0].facts, "precision": "bf16"}
    norms = [1.0, 1.0, tall, 1.0, 1.0]
    steps = {n: {**line, "grad_norm": norm} for (n, line), norm in zip(pair[0].steps.items(), norms, strict=True)}
    other = {n: dict(line) for n, line in steps.items()}
    other[list(steps)[at]]["grad_norm"] *= 1.03
    other[list(steps)[2]]["loss"] *= 1 + loss
    one = replace(pair[0], facts=facts, steps=steps)
    found = compare_runs(one, replace(one, steps=other))
    assert not found.holds
    assert any("stand out among their neighbours" in note for note in found.notes) == said


def test_a_changed_weight_is_named(pair: Any) -> None:
    one, copy = pair
    file = copy / "model" / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][0] *= 1.01
    save_file(weights, file, metadata={"format": "pt"})
    found = compare_runs(one, read_finished(copy))
    assert found.tensor is not None
    assert found.tensor[0] == name
    assert found.reasons == [f"tensor {name} is {found.tensor[1]:.1e} apart at the end (1e-04 allowed)"]
    del weights[name]
    save_file(weights, file, metadata={"format": "pt"})
    assert f"other tensors, or of other shapes: {name}" in compare_runs(one, read_finished(copy)).reasons[0]


def test_other_rows_and_other_lengths_are_named(pair: Any) -> None:
    one, _ = pair
    rows = {step: checksum + (step >= 4) for step, checksum in one.rows.items()}
    assert (compare_runs(one, replace(one, rows=rows)).first or "").startswith("step 4: the checksum")
    longer = {**one.facts, "length": {**one.facts["length"], "num_steps": STEPS + 1}}
    assert "ended at step" in compare_runs(one, replace(one, facts=longer)).reasons[0]
    few = {step: line for step, line in one.steps.items() if step > 5}
    assert "no step is logged in both" in compare_runs(one, replace(one, steps=few)).reasons[0]


def test_what_differs_without_parting_the_paths_is_a_note(pair: Any) -> None:
    one, _ = pair
    runs = {**one.facts["runs"], "model_dtypes": ["bfloat16"]}
    other = replace(one, facts={**one.facts, "runs": runs, "identity": {**one.facts["identity"], "seed": 8}})
    found = compare_runs(one, other)
    assert found.holds
    assert found.notes == [
        "the recipes differ in seed",
        f"model_dtypes: float32 in {one.name}, bfloat16 in {one.name}",
    ]


def test_adapters_in_bf16_may_differ_more(pair: Any) -> None:
    facts = pair[0].facts
    half = {**facts, "precision": "bf16"}
    adapters = {**half, "identity": {**facts["identity"], "lora.rank": 8}}
    assert compare.tolerance_between(facts, facts).weights == 1e-4
    assert compare.tolerance_between(facts, half).weights == 1e-2
    assert compare.tolerance_between(adapters, adapters).weights == 0.2


def test_a_broken_run_cannot_hide_behind_a_rounded_reference(pair: Any) -> None:
    """Rounded losses are a fault of one run, not a difference, where both have them."""
    one, _ = pair
    steps, before = {}, 0
    for step, line in one.steps.items():
        targets = line["tokens"] - before
        steps[step] = {**line, "loss": round(line["loss"] * targets) / targets}
        before = line["tokens"]
    rounded = replace(one, name="rounded", steps=steps)
    assert any("are rounded" in reason for reason in compare_runs(one, rounded).reasons)
    assert not any("are rounded" in reason for reason in compare_runs(rounded, rounded).reasons)


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 32, "num_key_value_heads": 8},
    "gpt2": {},
    "qwen3": {},
    "gemma3_text": {},
    "mixtral": {},
    "qwen2_moe": {},
    "deepseek_v3": {},
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_shrunk_network_is_small_and_of_its_architecture(kind: str) -> None:
    large = AutoConfig.for_model(kind, **MODELS[kind])
    given = {"model_type": kind, "vocab_size": 512, **MODELS[kind]}
    recipe = validate_recipe(small(model={"config": given}))
    tree = shrink_model(recipe)
    config = AutoConfig.for_model(**tree["model"]["config"])
    network = AutoModelForCausalLM.from_config(config)
    with torch.device("meta"):
        assert type(network) is type(AutoModelForCausalLM.from_config(large))
    assert sum(p.numel() for p in network.parameters()) < 3e6
    assert network(input_ids=torch.arange(16)[None]).logits.isfinite().all()
    if kind == "llama":
        assert config.num_attention_heads // config.num_key_value_heads == 4
    if kind == "gemma3_text":
        assert set(config.layer_types) == set(large.layer_types)


def test_what_cannot_be_shrunk_is_said() -> None:
    recipe = validate_recipe(small(model={"config": {"model_type": "falcon"}}))
    with pytest.raises(RecipeError, match="a small falcon cannot be derived"):
        shrink_model(recipe)
    recipe = validate_recipe(small(task={"name": "own_task:mlp"}))
    with pytest.raises(RecipeError, match="the task's own"):
        shrink_model(recipe)


def test_a_pretrained_model_is_shrunk_to_random_weights(tmp_path: Path) -> None:
    source = {**small(), "model": {"name": MODEL}, "tokenizer": {}, "lora": {"rank": 4}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(source))
    launches = find_launches("single,ddp")
    written = write_recipes(load_recipe(tmp_path / "recipe.yaml"), launches, tmp_path / "runs", steps=2, shrink=True)
    one, other = load_recipe(written["single"]), load_recipe(written["ddp"])
    assert one.model.name is None
    assert one.model.config is not None
    assert one.model.config["vocab_size"] == 512
    assert one.tokenizer.name == MODEL
    # The same recipe, but for where it goes.
    assert dump_recipe(one).replace("runs/single", "runs/ddp") == dump_recipe(other)


def test_processes_may_be_given_for_all_launch_files() -> None:
    assert {name: launch.num_processes for name, launch in find_launches("single,fsdp", 1).items()} == {
        "single": 1,
        "fsdp": 1,
    }
    with pytest.raises(BackendError, match="--num_processes takes a whole number from 1, got 0"):
        find_launches("single,fsdp", 0)


@pytest.mark.parametrize(
    ("optim", "eps"),
    [
        ({"args": {}}, 1e-6),
        ({"args": {"eps": 1e-3}}, 1e-3),
        ({"name": "AdamW8bit", "args": {"eps": 1e-8}}, 1e-6),
        ({"name": "SGD", "args": {}}, None),
    ],
)
def test_adam_does_not_divide_rounding_by_rounding(optim: dict[str, Any], eps: float | None, tmp_path: Path) -> None:
    recipe = validate_recipe(small(optim=optim))
    written = write_recipes(recipe, find_launches("single,ddp"), tmp_path, steps=2, shrink=False)
    assert load_recipe(written["ddp"]).optim.args.get("eps") == eps


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--on"),
        (["--on", "single"], "two launch configs at least"),
        (["--on", "single,dpp"], "did you mean 'ddp'"),
        (["--on", "ddp,ddp"], "named twice"),
        (["--on", "single,ddp", "--inject", "bf16"], "did you mean 'bf16-loss'"),
        (["--on", "single,ddp", "--steps", "0"], "one step at least"),
        (["--on", "single,ddp", "length.steps=3"], "length.steps=3: parity gives all runs the same few steps"),
        (["--on", "single,hsdp", "batch.global_size=6", "batch.micro_size=3"], "hsdp"),
        (["--on", "single,ddp", "lenght.steps=3"], "lenght"),
    ],
)
def test_what_cannot_be_asked_is_one_paragraph(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small()))
    assert main.main(["parity", str(tmp_path / "recipe.yaml"), "--to", str(tmp_path / "runs"), *words]) == 2
    said = capsys.readouterr().err
    assert said.count("Error: ") == 1
    assert says in said


def test_several_finished_runs_are_compared_with_the_first(
    pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, copy = pair
    third = Path(shutil.copytree(copy, tmp_path / "third"))
    lines = [json.loads(line) for line in (third / "metrics.jsonl").read_text().splitlines()]
    lines[2]["loss"] *= 1.001
    (third / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    capsys.readouterr()
    assert main.main(["parity", str(one.directory), str(copy), str(third), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["reference"], found["holds"], [*found["runs"]]) == ("single", False, ["single", "copy", "third"])
    assert {name: each["holds"] for name, each in found["comparisons"].items()} == {"copy": True, "third": False}
    assert main.main(["parity", str(one.directory), str(copy), str(copy)]) == 0
    assert capsys.readouterr().out.count("the path of ") == 2


def test_what_is_no_finished_run_is_refused(pair: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, copy = pair
    facts = {key: value for key, value in one.facts.items() if key != "finished"}
    (copy / "run.json").write_text(json.dumps(facts))
    assert main.main(["parity", str(one.directory), str(copy)]) == 2
    assert "has not come to its end" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main.main(["parity", str(tmp_path / "empty"), str(copy)]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main.main(["parity", str(copy)]) == 2
    assert "RUN_A RUN_B …" in capsys.readouterr().err


def test_a_run_that_is_there_is_not_replaced(launched: Any, tmp_path: Path) -> None:
    recipe = validate_recipe(small())
    with pytest.raises(RecipeError, match="is there already"):
        write_recipes(recipe, find_launches("single,ddp"), launched[3], steps=2, shrink=False)

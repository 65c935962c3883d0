"""Exports say what training said, opened by plain transformers and peft; planted faults are caught."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from exports import Trained, change, exported, logits_of, opened_here, train
from inside import copy, forge
from recipes_for_tests import MODEL, base
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from finetune.cli import main
from finetune.export import export_weights, find_weights, model_card, verify_export
from finetune.models import prompts
from finetune.models.heads import NEXT_TOKEN
from finetune.utils.atomic_files import file_digest
from finetune.utils.errors import CheckpointError, FinetuneError, RecipeError

pytestmark = [
    pytest.mark.xdist_group("export"),
]

UNTIED = {**base()["model"]["config"], "vocab_size": 512, "tie_word_embeddings": False}
RUNS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 4}},
    "dora": {"lora": {"rank": 4, "dora": True, "rslora": True}},
    "pissa": {"lora": {"rank": 4, "init": "pissa"}},
    "qlora": {"model": {"quantization": "nf4"}, "lora": {"rank": 4}},
    "int8": {"model": {"quantization": "int8"}, "lora": {"rank": 4}},
    "whole": {
        "model": {"name": None, "config": UNTIED},
        "lora": {"rank": 4, "save_modules": ["embed_tokens", "lm_head"]},
    },
}
# How far packing takes the logits at most, relative to the largest.
PACKED = {"qlora": 1.0, "int8": 0.1}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {name: train(tmp_path_factory.mktemp(name), sections) for name, sections in RUNS.items()}


@pytest.fixture(autouse=True)
def in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets this process open what was written, where starting another would take most of a test's time."""
    if request.node.get_closest_marker("timeout") is None:
        monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("kind", ["merged", "merged-16bit"])
@pytest.mark.parametrize("name", list(RUNS))
def test_merged_is_what_was_trained(runs: dict[str, Trained], tmp_path: Path, name: str, kind: str) -> None:
    run = runs[name]
    folder, said = exported(run.directory, kind, tmp_path)
    # On the unquantised base, the adapter is what training made, but not what training ran.
    wanted = logits_of(Path(MODEL), run.directory / "model") if name in PACKED else run.logits
    limit = verify_export.TOLERANCE[torch.float32 if kind == "merged" else torch.bfloat16][0]
    away = (logits_of(folder) - wanted).abs().max() / wanted.abs().max()
    assert away <= limit
    away = re.search(r"In training the base was quantised \((\w+)\): with it, logits differ by ([\d.e-]+) of", said)
    assert (away is not None) == (name in PACKED)
    if away is not None:
        assert away[1] == RUNS[name]["model"]["quantization"]
        assert float(away[2]) < PACKED[name]
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {
        torch.float32 if kind == "merged" else torch.bfloat16
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["dtype"] == ("float32" if kind == "merged" else "bfloat16")
    assert "quantization_config" not in config
    # Tied ends are written once.
    assert ("lm_head.weight" in load_file(folder / "model.safetensors")) == (name == "whole")
    assert [path.name for path in tmp_path.iterdir()] == [kind]


@pytest.mark.parametrize("name", ["lora", "dora", "pissa", "qlora", "int8"])
def test_the_adapter_opens_by_peft_alone(runs: dict[str, Trained], tmp_path: Path, name: str) -> None:
    folder, _ = exported(runs[name].directory, "adapter", tmp_path)
    found = logits_of(Path(MODEL), folder)
    wanted = logits_of(Path(MODEL), runs[name].directory / "model") if name in PACKED else runs[name].logits
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == MODEL


def test_what_lies_beside_the_weights(runs: dict[str, Trained], tmp_path: Path) -> None:
    run = copy(runs["lora"].directory, tmp_path / "run")
    folder, said = exported(run, "merged", tmp_path, step=2)
    assert "logits differ by" in said
    assert "allowed for float32: 1e-04" in said
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert (folder / "tokenizer.json").is_file()
    card = (folder / "README.md").read_text()
    for words in (
        "# base_model: say which; the run took it from a folder",
        "# license: say which",
        "validation_loss: ",
        "rank: 4",
        "step",
        "train.jsonl",
        "Proved",
    ):
        assert words in card
    assert json.loads((folder / "export.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "meta-llama/Llama-3.2-1B",
            "base_model: meta-llama/Llama-3.2-1B\npipeline_tag: text-generation\nlicense: mit\n",
        ),
        (
            MODEL,
            "pipeline_tag: text-generation\nlicense: mit\n# base_model: say which; the run took it from a folder\n",
        ),
    ],
)
def test_the_head_of_the_card_is_one_that_the_hub_takes(
    runs: dict[str, Trained], tmp_path: Path, name: str, said: str
) -> None:
    """It refuses a base that is a folder, and wants the licence of the base."""
    found = find_weights.find_weights(runs["full"].directory)
    model = found.recipe.model.model_copy(update={"name": name})
    (tmp_path / "README.md").write_text("---\nlicense: mit\ntags: [a]\n---\n# Base\n")
    run = replace(found, recipe=found.recipe.model_copy(update={"model": model}))
    model_card.write_model_card(tmp_path, run, "merged", ["Proved"], tmp_path, NEXT_TOKEN)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith(f"---\nlibrary_name: transformers\n{said}---\n")


def test_shards_have_an_index(runs: dict[str, Trained], tmp_path: Path) -> None:
    folder, _ = exported(runs["full"].directory, "merged", tmp_path, shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) >= 4
    assert (folder / "model.safetensors.index.json").is_file()
    torch.testing.assert_close(logits_of(folder), runs["full"].logits, rtol=0, atol=0)


@pytest.mark.timeout(120)
def test_a_fresh_process_knows_nothing_of_this_toolkit(
    runs: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[dict[str, Any]] = []
    fresh = verify_export.open_in_fresh_process

    def spy(*given: Any) -> dict[str, Any]:
        answers.append(fresh(*given))
        return answers[-1]

    monkeypatch.setattr(verify_export, "open_in_fresh_process", spy)
    exported(runs["lora"].directory, "merged", tmp_path)
    assert answers[0]["ours"] == []
    assert answers[0]["distance"] > 0
    assert answers[0]["loss"] == pytest.approx(runs["lora"].loss, abs=0.2)


@pytest.mark.timeout(120)
def test_a_process_that_cannot_open_it_is_quoted(tmp_path: Path) -> None:
    probe = verify_export.Probe({"expected": torch.zeros(1)}, {}, None)
    about = {"auto": "AutoModelForCausalLM", "base": None, "trust_remote_code": False}
    with pytest.raises(CheckpointError, match=r"A fresh process cannot open what was written to .*: \w+"):
        verify_export.open_in_fresh_process(tmp_path, probe, about)


# ---------------------------------------------------------------- planted faults


PROJ = "model.layers.1.mlp.up_proj.weight"


def nudge(folder: Path) -> None:
    change(folder, lambda tensors: tensors[PROJ][0].add_(1e-3 * tensors[PROJ].abs().max()))


def wreck(folder: Path) -> None:
    change(folder, lambda tensors: tensors[PROJ].neg_())


def untie(folder: Path) -> None:
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] * 1.1}))


def pad_as_end(folder: Path) -> None:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token_id": 0}))


def not_a_number(folder: Path) -> None:
    change(folder, lambda tensors: tensors[PROJ].view(-1)[7].fill_(float("nan")))


def shorter(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(2**19)


def twice(folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")


def wrong_total(folder: Path) -> None:
    file = folder / verify_export.INDEX
    index = json.loads(file.read_text())
    index["metadata"]["total_size"] += 4
    file.write_text(json.dumps(index))


def drop_shard(folder: Path) -> None:
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()


# Each fault, what is said of it, and the check that says it, without which it goes further.
FAULTS: dict[str, tuple[Callable[[Path], Any], str, tuple[Any, str]]] = {
    "one tensor a little off": (
        nudge,
        rf"The tensor that differs most is {PROJ}, by 1.0e-03",
        (verify_export, "worst_tensor"),
    ),
    "one tensor far off": (
        wreck,
        rf"logits that differ by .* The tensor that differs most is {PROJ}",
        (verify_export, "check_figures"),
    ),
    "tie broken": (
        untie,
        r"lm_head.weight and model.embed_tokens.weight are one weight",
        (verify_export, "check_files"),
    ),
    "pad as end": (
        pad_as_end,
        r"stops at 0 \('<unk>'\), but texts end at 2 \('</s>'\): generation would not stop",
        (prompts, "check_stop_tokens"),
    ),
    "NaN": (not_a_number, rf"{PROJ} holds 1 numbers that are NaN or infinite", (verify_export, "check_files")),
    "missing": (
        lambda f: change(f, lambda t: t.pop(PROJ)),
        rf"1 tensors are missing \({PROJ}\)",
        (verify_export, "_check_listing"),
    ),
    "unexpected": (
        lambda f: change(f, lambda t: t.update(more=torch.ones(2))),
        r"unexpected \(more\)",
        (verify_export, "_check_listing"),
    ),
    "empty": (
        lambda f: change(f, lambda t: t.update({PROJ: torch.ones(0)})),
        rf"{PROJ} is empty",
        (verify_export, "check_files"),
    ),
    "of another shape": (
        lambda f: change(f, lambda t: t.update({PROJ: t[PROJ].T.contiguous()})),
        rf"{PROJ} has shape \[64, 172\], not \[172, 64\]",
        (verify_export, "_check_listing"),
    ),
    "of another type": (
        lambda f: change(f, lambda t: t.update({PROJ: t[PROJ].half()})),
        r"the tensors take 472,832 bytes",
        (verify_export, "_check_listing"),
    ),
    "written twice": (twice, r"the tensors take 989,696 bytes, .* need 494,848", (verify_export, "_check_listing")),
}


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Spoils a folder as soon as the weights are written."""
    saved = PreTrainedModel.save_pretrained

    def planted(fault: Callable[[Path], None]) -> None:
        def save(self: Any, folder: Path, **options: Any) -> None:
            saved(self, folder, **options)
            fault(Path(folder))

        monkeypatch.setattr(PreTrainedModel, "save_pretrained", save)

    return planted


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_full_disk(runs: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """safetensors has an error of its own for it."""

    def full(*given: Any, **named: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "serialize_file", full)
    with pytest.raises(CheckpointError, match=r"cannot be written to .*: .*No space left on device.* Free space, or"):
        exported(runs["lora"].directory, kind, tmp_path)


def without(monkeypatch: pytest.MonkeyPatch, check: tuple[Any, str]) -> None:
    nothing = {"worst_tensor": ("none", 0.0), "check_files": "", "check_figures": ""}
    monkeypatch.setattr(*check, lambda *given, **named: nothing.get(check[1]))


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_caught_and_would_not_be_without_its_check(
    runs: dict[str, Trained],
    tmp_path: Path,
    plant: Callable[[Callable[[Path], None]], None],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    fault, says, check = FAULTS[name]
    plant(fault)
    with pytest.raises(CheckpointError, match=says):
        exported(runs["lora"].directory, "merged", tmp_path)
    # Nothing has the name; what failed can be looked at.
    assert [path.name for path in tmp_path.iterdir()] == ["merged.failed"]
    without(monkeypatch, check)
    said = ""
    try:
        exported(runs["lora"].directory, "merged", tmp_path)
    except FinetuneError as error:
        said = str(error)
    assert not re.search(says, said)


@pytest.mark.parametrize(
    ("fault", "shards", "says"),
    [
        (shorter, {}, r"merged.staging/model.safetensors cannot be read"),
        (drop_shard, {"shard_size": "100KB"}, r"lacks model-00002-of-0000\d.safetensors, which its index names"),
        (wrong_total, {"shard_size": "100KB"}, r"the tensors take 494,848 bytes, .* and the index says 494,852"),
    ],
)
def test_files_that_cannot_be_right(
    runs: dict[str, Trained], tmp_path: Path, plant: Any, fault: Any, shards: dict[str, str], says: str
) -> None:
    plant(fault)
    with pytest.raises(CheckpointError, match=says):
        exported(runs["full"].directory, "merged", tmp_path, **shards)
    assert [path.name for path in tmp_path.iterdir()] == ["merged.failed"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tie broken", "gives logits"),
        ("missing", "missing keys: .*up_proj"),
        ("NaN", "gives logits"),
    ],
)
def test_opening_finds_what_looking_did_not(
    runs: dict[str, Trained], tmp_path: Path, plant: Any, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    plant(FAULTS[name][0])
    without(monkeypatch, (verify_export, "check_files"))
    with pytest.raises(CheckpointError, match=says):
        exported(runs["lora"].directory, "merged", tmp_path)


ADAPTER = "adapter_model.safetensors"


def spoiled(run: Path, target: Path, act: Callable[[dict[str, torch.Tensor]], Any], name: str = ADAPTER) -> Path:
    """A run whose checkpoints hold other tensors, and digests that fit them."""
    spoilt = copy(run, target)
    for folder in (spoilt / "checkpoints").iterdir():
        file = folder / "model" / name
        change(file.parent, act, name)
        facts = {"bytes": file.stat().st_size, "xxh3_128": file_digest(file)}
        forge(folder, lambda manifest, facts=facts: manifest["files"].update({f"model/{name}": facts}))
    return spoilt


@pytest.mark.parametrize("kind", ["adapter", "merged"])
def test_a_zeroed_adapter(runs: dict[str, Trained], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    run = spoiled(
        runs["lora"].directory, tmp_path / "run", lambda t: [v.zero_() for k, v in t.items() if "lora_B" in k]
    )
    with pytest.raises(CheckpointError, match="the adapter changes no logit of its base: nothing was trained"):
        exported(run, kind, tmp_path)
    monkeypatch.setattr(verify_export, "check_figures", lambda *given: "")
    exported(run, kind, tmp_path)


A = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("name", "kind", "act", "says"),
    [
        ("lora", "adapter", lambda t: t.clear(), r"holds no tensor: nothing was written"),
        ("lora", "adapter", lambda t: t[A].fill_(float("nan")), rf"{A} holds 688 numbers that are NaN"),
        ("lora", "merged", lambda t: t[A].fill_(float("nan")), r"layers.0.mlp.down_proj.weight holds .* NaN"),
        ("lora", "adapter", lambda t: t.pop(A), rf"1 tensors are missing \({A}\), 0 are unexpected"),
        (
            "lora",
            "merged",
            lambda t: t.update(more=torch.ones(1)),
            r"0 tensors are missing .*, 1 are unexpected \(more",
        ),
        ("lora", "merged", lambda t: t.update({A: torch.ones(4, 9)}), rf"{A} has shape \[4, 9\], where the model has"),
        ("full", "merged", lambda t: t.pop(PROJ), rf"lacks 1 of the network's tensors: {PROJ}"),
        ("full", "merged", lambda t: t[PROJ].fill_(float("inf")), rf"{PROJ} holds 11,008 numbers that are NaN or inf"),
    ],
)
def test_a_checkpoint_that_is_broken(
    runs: dict[str, Trained], tmp_path: Path, name: str, kind: str, act: Any, says: str
) -> None:
    run = spoiled(runs[name].directory, tmp_path / "run", act, ADAPTER if name == "lora" else "model.safetensors")
    with pytest.raises(CheckpointError, match=says):
        exported(run, kind, tmp_path)
    assert not (tmp_path / kind).exists()


# ---------------------------------------------------------------- what is refused


def test_another_base(runs: dict[str, Trained], tmp_path: Path) -> None:
    other = Path(shutil.copytree(MODEL, tmp_path / "other"))
    same = Path(shutil.copytree(MODEL, tmp_path / "same"))
    change(other, lambda tensors: tensors["model.norm.weight"].mul_(1.01))
    with pytest.raises(RecipeError, match=rf"was trained on {MODEL} \(digest .*\), but {other} has other content"):
        exported(runs["lora"].directory, "merged", tmp_path, base=str(other))
    folder, _ = exported(runs["lora"].directory, "adapter", tmp_path, base=str(same))
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(same)


@pytest.mark.parametrize(
    ("name", "kind", "options", "says"),
    [
        ("full", "adapter", {}, "trained all weights .* Use --as merged"),
        ("whole", "adapter", {}, "onto random weights, which lie in no folder"),
        ("whole", "merged", {"base": MODEL}, "began from random weights, .* Leave --base out"),
        ("full", "merged", {"base": MODEL}, "trained all weights, and needs no base. Leave --base out"),
        ("lora", "merged", {"step": 7}, "has no checkpoint of step 7. Its steps are 2, 3"),
    ],
)
def test_refused(
    runs: dict[str, Trained], tmp_path: Path, name: str, kind: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(FinetuneError, match=says):
        exported(runs[name].directory, kind, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_damaged_checkpoint(runs: dict[str, Trained], tmp_path: Path) -> None:
    run = copy(runs["lora"].directory, tmp_path / "run")
    file = run / "checkpoints" / "step-00000003" / "model" / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"was changed after it was written: .* Name another step with --step"):
        exported(run, "merged", tmp_path)
    exported(run, "merged", tmp_path, step=2)


def test_the_command(
    runs: dict[str, Trained], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(runs["lora"].directory)
    words = ["export", run, "--as", "merged-16bit", "--to", str(tmp_path / "to")]
    assert main.main(words) == 0
    assert "Proved in a fresh process" in capsys.readouterr().out
    assert main.main(words) == 2
    assert "is there already. Choose another --to, or remove it." in capsys.readouterr().err
    assert main.main(["export", str(tmp_path), "--as", "merged"]) == 2
    assert "is no run (it has no recipe.yaml)" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert main.main([*words[:-1], str(tmp_path / "pushed"), "--push-to", "me/model"]) == 2
    assert "nobody is logged in to the hub" in capsys.readouterr().err
    assert not (tmp_path / "pushed").exists()


def test_pushing_goes_to_a_private_place_and_a_failure_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            asked.append((name, options))
            return type("Place", (str,), {"repo_id": f"me/{name}"})(f"https://hub/me/{name}")

        def upload_folder(self, **options: Any) -> None:
            if len(asked) > 2:
                raise OSError("no more\nroom")
            asked.append((options["repo_id"], options["folder_path"]))

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    assert export_weights.push_folder(tmp_path, "model") == "https://hub/me/model"
    assert asked == [("model", {"private": True, "exist_ok": True}), ("me/model", str(tmp_path))]
    with pytest.raises(
        CheckpointError, match=r"--push-to model: no more room\. The export is whole, in .*hf upload model"
    ):
        export_weights.push_folder(tmp_path, "model")

"""Exports of what other backends wrote, and of networks of other kinds."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import Trained, change, exported, logits_of, opened_here, train, tree_of
from harness import Launcher
from inside import run_here
from recipes_for_tests import ARCHITECTURES, MODEL, base, stories
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from finetune.config.recipe import validate_recipe
from finetune.export import merge, verify_export
from finetune.export.load_model import load_model
from finetune.tasks.causal_lm import CAUSAL_LM
from finetune.utils.errors import CheckpointError, FinetuneError, RecipeError


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)


# ---------------------------------------------------------------- what two processes wrote

SHORT = {
    "data": {"train": stories("train", limit=60), "validation": stories("validation", limit=2), "sequence_length": 64},
    "length": {"steps": 3},
    "checkpoint": {"every_steps": 2},
}
JOBS = {
    "full": base(model={"config": ARCHITECTURES["mixtral"]["model"]["config"]}, **SHORT),
    "lora": {**base(lora={"rank": 4, "dora": True}, **SHORT), "model": {"name": MODEL}},
}
LAUNCHED_RUNS = dict.fromkeys(("fsdp", "zero3"), JOBS)


@pytest.mark.parametrize("name", list(JOBS))
@pytest.mark.parametrize(
    "backend", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("fsdp", "zero3")]
)
def test_checkpoints_of_two_processes(launcher: Launcher, tmp_path: Path, backend: str, name: str) -> None:
    """Their last one says what the run said; an earlier one is another network."""
    run = launcher.many(backend, JOBS)[name].check()
    folder, _ = exported(run.directory / "checkpoints" / "step-00000003", "merged", tmp_path)
    assert json.loads((folder / "export.json").read_text())["step"] == 3
    assert loss_of(folder, launcher) == pytest.approx(run.validation(), abs=1e-4)
    earlier, _ = exported(run.directory, "merged", tmp_path / "earlier", step=2)
    tensors, others = (load_file(path / "model.safetensors") for path in (folder, earlier))
    assert tensors.keys() == others.keys()
    assert not any(torch.equal(tensors[key], others[key]) for key in tensors if "q_proj" in key)
    if name == "lora":
        adapter, _ = exported(run.directory, "adapter", tmp_path)
        torch.testing.assert_close(logits_of(Path(MODEL), adapter), logits_of(folder), rtol=0, atol=1e-3)


def loss_of(folder: Path, launcher: Launcher) -> float:
    """Over the runs' validation rows."""
    recipe = validate_recipe(
        {**JOBS["full"], "data": {**JOBS["full"]["data"], "cache_dir": str(launcher.shared / "cache")}}
    )
    rows = CAUSAL_LM.build_data(recipe, True).validation
    assert rows is not None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    every = torch.arange(len(rows)).numpy()
    with torch.no_grad():
        return float(CAUSAL_LM.loss_sum(model, rows.batch(every))) / rows.num_targets(every)


# ---------------------------------------------------------------- other networks


def kind_of(name: str, lora: dict[str, Any] | None = None) -> dict[str, Any]:
    sections: dict[str, Any] = {"model": {"name": None, **ARCHITECTURES[name]["model"]}}
    return sections | ({"lora": lora} if lora is not None else {})


@pytest.mark.parametrize(
    ("shape", "lora"),
    [("gpt2", None), ("gpt2", {"rank": 2}), ("mixtral", None), ("mixtral", {"rank": 2}), ("gemma3", None)],
)
def test_other_architectures(tmp_path: Path, shape: str, lora: dict[str, Any] | None) -> None:
    run = train(tmp_path, kind_of(shape, lora))
    for kind, limit in (("merged", 1e-5), ("merged-16bit", 5e-2)):
        folder, said = exported(run.directory, kind, tmp_path)
        away = (logits_of(folder) - run.logits).abs().max() / run.logits.abs().max()
        assert away <= limit
        assert "no tensor by more than" in said


def test_experts_are_compared_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are stored under other names than they compute with."""
    run = train(tmp_path, kind_of("mixtral"))
    expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    check = verify_export.worst_tensor

    def spoil(folder: Path, expected: dict[str, torch.Tensor]) -> tuple[str, float]:
        assert expected.keys() >= load_file(folder / "model.safetensors").keys()
        change(folder, lambda tensors: tensors[expert][0].add_(1e-3 * tensors[expert].abs().max()))
        return check(folder, expected)

    monkeypatch.setattr(verify_export, "worst_tensor", spoil)
    with pytest.raises(CheckpointError, match=rf"The tensor that differs most is {expert}, by 1.0e-03"):
        exported(run.directory, "merged", tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    """transformers would draw it anew, the same one whenever it is asked."""
    run = train(tmp_path, kind_of("mixtral"))
    shutil.rmtree(run.directory / "checkpoints")
    expert = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    change(run.directory / "model", lambda tensors: tensors.pop(expert))
    with pytest.raises(
        CheckpointError, match=f"do not make up the network. 1 tensors are missing: {expert}. .* Restore it"
    ):
        exported(run.directory, "merged", tmp_path)


def test_a_loss_of_ones_own_is_no_difference(tmp_path: Path) -> None:
    """The trained and the opened network are compared by one loss, whatever the run trained with."""
    file = tmp_path / "own_loss.py"
    file.write_text(
        "from torch.nn.functional import cross_entropy\n\n\n"
        "def tripled(network, batch):\n"
        "    logits = network(input_ids=batch['input_ids'], use_cache=False).logits\n"
        "    return 3 * cross_entropy(logits.float().flatten(0, 1), batch['targets'].flatten(), reduction='sum')\n"
    )
    run = train(tmp_path, {"task": {"loss": f"{file}:tripled"}})
    _, said = exported(run.directory, "merged", tmp_path)
    assert "the loss" in said


LABELLED = {
    "task": {"name": "sequence_classification"},
    "data": {**ARCHITECTURES["bert"]["data"], "train": [{"sample": 120}]},
    "length": {"steps": 3},
}
ADAPTER = {"lora": {"rank": 4}}


@pytest.mark.parametrize(("shape", "lora"), [("bert", {}), ("llama", {}), ("bert", ADAPTER), ("llama", ADAPTER)])
def test_classifiers(tmp_path: Path, shape: str, lora: dict[str, Any]) -> None:
    """Rows of several lengths at once give what they give one by one: what fills them is not read."""
    model = ARCHITECTURES["bert"]["model"] if shape == "bert" else {"name": MODEL}
    run = train_labelled(tmp_path, model, lora)
    folder, said = exported(run, "merged", tmp_path)
    assert "logits differ by" in said
    classifier = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert len(classifier.config.id2label) == 7
    assert not any(label.startswith("LABEL_") for label in classifier.config.id2label.values())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["Once upon a time there was a cat.", "The end.", "Tom and Lily went to the park to play with a ball."]
    with torch.no_grad():
        together = classifier(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        alone = torch.cat([classifier(**tokenizer(text, return_tensors="pt")).logits for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    if lora and "name" in model:
        exported(run, "adapter", tmp_path)


def train_labelled(directory: Path, model: dict[str, Any], more: dict[str, Any]) -> Path:
    tree = base(**LABELLED, **more, output={"dir": str(directory / "run")})
    tree["data"].pop("validation_fraction")
    return run_here({**tree, "model": model}).directory


def test_a_tokenizer_that_can_fill_no_row_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(place)
    with pytest.raises(RecipeError, match="has neither a padding token nor an end of text, and a llama classifies"):
        train_labelled(tmp_path, {"name": MODEL}, {"tokenizer": {"name": str(place)}})


# ---------------------------------------------------------------- other types


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base that lies on the disk in four bits."""
    folder = tmp_path_factory.mktemp("packed") / "base"
    how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=how, dtype=torch.float32)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.mark.xdist_group("export_packed")
@pytest.mark.parametrize("kind", ["adapter", "merged", "merged-16bit"])
def test_a_base_that_is_stored_quantised(packed: Path, tmp_path: Path, kind: str) -> None:
    run = train(tmp_path, {"model": {"name": str(packed)}, "lora": {"rank": 4}})
    folder, said = exported(run.directory, kind, tmp_path)
    assert ("Merged onto the dequantised" in said) == (kind != "adapter")
    assert "In training the base was quantised (stored)" in said
    if kind == "adapter":
        return
    away = (logits_of(folder) - run.logits).abs().max() / run.logits.abs().max()
    assert away <= (1e-4 if kind == "merged" else 5e-2)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())
    assert load_file(folder / "model.safetensors").keys() == load_file(Path(MODEL) / "model.safetensors").keys()


def half(folder: Path) -> Path:
    """The model in fp16."""
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    place = tmp_path_factory.mktemp("half")
    return train(place, {"model": {"name": str(half(place / "base"))}, "lora": {"rank": 4}})


@pytest.mark.xdist_group("export_packed")
def test_a_base_in_fp16_is_written_in_fp16(halved: Trained, tmp_path: Path) -> None:
    folder, said = exported(halved.directory, "merged-16bit", tmp_path)
    assert "(allowed for float16: 1e-02)" in said
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    away = (logits_of(folder) - halved.logits).abs().max() / halved.logits.abs().max()
    assert away <= 1e-2
    exact, _ = exported(halved.directory, "merged", tmp_path)
    for name, tensor in load_file(exact / "model.safetensors").items():
        assert torch.equal(tensor.half(), load_file(folder / "model.safetensors")[name]), name


@pytest.mark.xdist_group("export_packed")
def test_what_fp16_cannot_hold_is_named(halved: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = merge.tensors_of
    monkeypatch.setattr(merge, "tensors_of", lambda *place: ((k, 1e5 * v) for k, v in read(*place)))
    with pytest.raises(CheckpointError, match=r"proj.weight holds .* NaN or infinite, as fp16 ends at 65,504"):
        exported(halved.directory, "merged-16bit", tmp_path)
    exported(halved.directory, "merged", tmp_path)


# ---------------------------------------------------------------- what lies beside a base

SPM = {"tokenizer.model": b"pieces"}
PROCESSOR = {"processor_config.json": b'{"image_seq_length": 4}', "preprocessor_config.json": b'{"size": 28}'}


def gemma3(folder: Path) -> Path:
    """A multimodal base, whose tied head has other names in files, with its processor."""
    text = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    for name, content in (SPM | PROCESSOR).items():
        (folder / name).write_bytes(content)
    return folder


def own_code(folder: Path) -> Path:
    """A base whose configuration and network are classes of its own, in files of which one imports the others."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own", "auto_map": classes}))
    for name, content in OWN_CODE.items():
        (folder / name).write_bytes(content)
    return folder


OWN_CODE = {
    "configuration_own.py": b"from transformers import LlamaConfig\n"
    b"class OwnConfig(LlamaConfig):\n    model_type = 'own'\n",
    "layers_own.py": b"from transformers import LlamaForCausalLM as Network\n",
    "modeling_own.py": b"from .configuration_own import OwnConfig\nfrom .layers_own import Network\n"
    b"class OwnForCausalLM(Network):\n    config_class = OwnConfig\n",
}


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
@pytest.mark.parametrize(
    ("made", "beside", "code"), [(gemma3, SPM | PROCESSOR, {}), (own_code, {}, OWN_CODE)], ids=["gemma3", "own code"]
)
def test_what_lies_beside_a_base_goes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, beside: Any, code: Any, lora: Any
) -> None:
    """Trained from a relative path, opened from another working directory."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another test, in another folder
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "transformers_modules").is_dir()])
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    made(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    trusted = bool(code)
    tree = tree_of(tmp_path, {"model": {"name": "./base", "trust_remote_code": trusted}, "lora": lora})
    tree.pop("tokenizer", None)
    run = run_here(tree).directory.resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    merged, _ = exported(run / "checkpoints" / "step-00000002", "merged", tmp_path, trust_remote_code=trusted)
    adapter = [] if lora is None else [exported(run, "adapter", tmp_path, trust_remote_code=trusted)[0]]
    for folder in (run / "model", run / "checkpoints" / "step-00000003" / "model", merged, *adapter):
        wanted = beside | (code if lora is None or folder == merged else {})
        assert {name: (folder / name).read_bytes() for name in wanted} == wanted
        assert load_model(str(folder), trust_remote_code=trusted).writes_text


@pytest.mark.parametrize("cached", ["nothing", "the processor", "that there is none"])
def test_a_processor_that_cannot_be_looked_up_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: str
) -> None:
    """A multimodal base in the hub's cache, as opening tokenizer and network leaves it, without the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    hub, commit = tmp_path / "models--own--gemma", "a" * 40
    files = gemma3(hub / "snapshots" / commit)
    marks = hub / ".no_exist" / commit
    for folder in (marks, hub / "refs"):
        folder.mkdir(parents=True)
    (hub / "refs" / "main").write_text(commit)
    for name in PROCESSOR if cached != "the processor" else ():
        (files / name).unlink()
    if cached == "that there is none":
        for name in (*PROCESSOR, "video_preprocessor_config.json", "audio_tokenizer_config.json", "chat_template.json"):
            (marks / name).touch()
    tree = tree_of(tmp_path, {"model": {"name": "own/gemma"}, "lora": {"rank": 2}})
    tree.pop("tokenizer", None)
    run = run_here(tree)
    written = [(run.directory / "model", run.said)]
    for kind in ("merged", "adapter"):
        written.append(exported(run.directory, kind, tmp_path))
    for folder, text in written:
        assert [(folder / name).exists() for name in PROCESSOR] == [cached == "the processor"] * len(PROCESSOR)
        warnings = [
            line for line in text.splitlines() if "Whether own/gemma has a Gemma3Processor is not known" in line
        ]
        assert len(warnings) == (cached == "nothing")
        assert all("processor_config.json, preprocessor_config.json, video" in line for line in warnings)
        assert all(f"--local-dir {folder}" in line for line in warnings)


def test_a_base_that_is_no_longer_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(MODEL, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    run = run_here(tree_of(tmp_path, {"model": {"name": "./base"}, "lora": {"rank": 2}})).directory
    (tmp_path / "base").rename(tmp_path / "moved")
    for place in (run, run / "model"):
        with pytest.raises(FinetuneError, match=r"no folder \S*/base, and models .* Name it with --base\."):
            load_model(str(place))
        assert load_model(str(place), base="./moved").writes_text

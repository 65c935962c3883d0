"""A pretrained model is loaded whole or not at all, whatever it is loaded for, and runs no code unasked."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from filelock import FileLock
from harness import Launcher
from inside import run_here
from ranks import Here, Place, assert_refused, start
from safetensors.torch import load_file, save_file
from testdata import MODEL, stories
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
)

from finetune.cli import main
from finetune.cli.new_project import Project, make_recipe
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.tokenization.tokenizer import load_tokenizer
from finetune.diagnostics.parity.launch_runs import small_sizes
from finetune.export.load_model import load_model
from finetune.models import lora_adapters, pretrained_files
from finetune.models.build_network import build_model, check_pretrained
from finetune.models.heads import NEXT_TOKEN, Head
from finetune.models.model_config import longest_row, resolve_model_config
from finetune.planning.model_shapes import with_vocabulary_size
from finetune.tasks.causal_lm import CAUSAL_LM
from finetune.tasks.classification import HEAD
from finetune.tasks.token_classification import HEAD as TOKEN_HEAD
from finetune.utils.errors import CheckpointError, FinetuneError, RecipeError

Tensors = dict[str, torch.Tensor]
UP = "model.layers.1.mlp.up_proj.weight"
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def spoil(source: str | Path, folder: Path, change: Callable[[Tensors], Any]) -> Path:
    """A copy of a model with other tensors."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def made(folder: Path, model_type: str, auto: Any = AutoModelForCausalLM, **sizes: Any) -> Path:
    config = AutoConfig.for_model(model_type, **{**SIZES, "vocab_size": 512, **sizes})
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


def recipe_of(folder: Path | str, **sections: Any) -> Recipe:
    tree = {
        "data": {"train": stories("train", limit=8), "sequence_length": 32},
        "batch": {"global_size": 2, "micro_size": 2},
        "length": {"steps": 1},
        "precision": "fp32",
    }
    model = {"name": str(folder), **sections.pop("model", {})}
    return validate_recipe({**tree, **sections, "model": model})


def checked(recipe: Recipe, head: Head = NEXT_TOKEN, **options: Any) -> pretrained_files.Weights:
    found = check_pretrained(recipe, resolve_model_config(recipe, head, **options), head)
    assert found is not None
    return found


WAYS: dict[str, Callable[[Path], Any]] = {
    "before the ranks meet": lambda folder: checked(recipe_of(folder)),
    "trained": lambda folder: built(recipe_of(folder)),
    "frozen": lambda folder: built(recipe_of(folder, model={"freeze": ["embed_tokens"]})),
    "lora": lambda folder: built(recipe_of(folder, lora={"rank": 2})),
    "nf4": lambda folder: built(recipe_of(folder, lora={"rank": 2}, model={"quantization": "nf4"})),
    "int8": lambda folder: built(recipe_of(folder, lora={"rank": 2}, model={"quantization": "int8"})),
    "opened": lambda folder: load_model(str(folder)),
}


def built(recipe: Recipe) -> torch.nn.Module:
    return build_model(recipe, resolve_model_config(recipe), NEXT_TOKEN)


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_tensor_is_refused_however_the_model_is_loaded(tmp_path: Path, way: str) -> None:
    folder = spoil(MODEL, tmp_path / "spoiled", lambda tensors: tensors.pop(UP))
    with pytest.raises(RecipeError, match=rf"{folder} lacks 1 of the network's tensors: {UP}\."):
        WAYS[way](folder)
    # A tied head and buffers that are not stored are none.
    WAYS[way](Path(MODEL))


@pytest.mark.parametrize("way", ["before the ranks meet", "trained", "lora", "opened"])
def test_a_tensor_of_another_shape_is_refused(tmp_path: Path, way: str) -> None:
    folder = spoil(MODEL, tmp_path / "spoiled", lambda tensors: tensors.update({UP: tensors[UP][:5].clone()}))
    with pytest.raises(RecipeError, match=rf"{folder}: {UP} has shape \[5, 64\], but the network needs \[172, 64\]"):
        WAYS[way](folder)


@pytest.mark.parametrize("config", ["zero3", "fsdp"])
def test_ranks_refuse_before_they_meet(place: Place, here: Here, config: str) -> None:
    """Sharded as it loads, only the first rank would see another shape, and leave the others waiting."""
    folder = spoil(MODEL, place.folder / "spoiled", lambda tensors: tensors.update({UP: tensors[UP][:5].clone()}))
    here.assert_refused(place.recipe(model={"config": None, "name": str(folder)}), f"{UP} has shape", config=config)
    assert not place.files()


def test_experts_that_the_network_holds_as_one(tmp_path: Path) -> None:
    folder = made(tmp_path / "whole", "mixtral", num_local_experts=4, num_key_value_heads=2)
    assert checked(recipe_of(folder)).lines == ()
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    spoiled = spoil(folder, tmp_path / "spoiled", lambda tensors: tensors.pop(name))
    for way in ("before the ranks meet", "trained"):
        with pytest.raises(RecipeError, match=f"do not make up the network. 1 tensors are missing: {name}"):
            WAYS[way](spoiled)


def test_a_model_that_is_stored_packed(tmp_path: Path) -> None:
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=packing)
    packed.save_pretrained(tmp_path / "packed")
    recipe = recipe_of(tmp_path / "packed", lora={"rank": 2})
    assert checked(recipe).lines == ()
    absmax = f"{UP}.absmax"
    spoiled = spoil(tmp_path / "packed", tmp_path / "spoiled", lambda tensors: tensors.pop(absmax))
    with pytest.raises(RecipeError, match=f"do not make up the network. 1 tensors are missing: {absmax}"):
        checked(recipe_of(spoiled, lora={"rank": 2}))


def test_tensors_that_are_left_out_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spoil(MODEL, tmp_path / "more", lambda tensors: tensors.update({"vision.weight": torch.ones(3)}))
    said = f"the network does not use 1 tensors of {folder}: vision.weight"
    tree = recipe_of(folder, output={"dir": str(tmp_path / "run")}, data={**recipe_of(folder).model_dump()["data"]})
    assert said in run_here({**tree.model_dump(mode="json"), "data": small(tmp_path)}).said
    assert main.main(["generate", str(folder), "--prompt", "Once", "--max-new-tokens", "2"]) == 0
    captured = capsys.readouterr()
    assert said in captured.err
    assert said not in captured.out


def small(folder: Path) -> dict[str, Any]:
    return {"train": stories("train", limit=8), "sequence_length": 32, "cache_dir": str(folder / "cache")}


# ---------------------------------------------------------------- heads


def test_a_classifiers_head_may_be_new(tmp_path: Path) -> None:
    recipe = recipe_of(MODEL)
    (new,) = checked(recipe, HEAD, num_labels=3).lines
    assert f"{MODEL} has no head for this task, its 1 tensors are new: score.weight" in new
    # But nothing below it.
    spoiled = spoil(MODEL, tmp_path / "spoiled", lambda tensors: tensors.pop(UP))
    with pytest.raises(RecipeError, match=f"lacks 1 of the network's tensors: {UP}"):
        checked(recipe_of(spoiled), HEAD, num_labels=3)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "distilbert", "electra", "gpt2", "deberta-v2"])
def test_new_heads_of_many_kinds(tmp_path: Path, model_type: str) -> None:
    sizes: dict[str, Any] = {"gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2}}.get(model_type, {})
    sizes |= {"distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}}.get(model_type, {})
    auto = transformers.AutoModelForMaskedLM if model_type != "gpt2" else AutoModelForCausalLM
    folder = made(tmp_path / "base", model_type, auto, **sizes, max_position_embeddings=64)
    new = checked(recipe_of(folder), HEAD, num_labels=2).lines[0]
    assert "has no head for this task" in new
    # A head that is there is read, and refused if it is not whole or has other classes.
    recipe = recipe_of(folder)
    network = build_model(recipe, resolve_model_config(recipe, HEAD, num_labels=2), HEAD)
    network.save_pretrained(tmp_path / "head")
    recipe = recipe_of(tmp_path / "head")
    assert checked(recipe, HEAD, num_labels=2).lines == ()
    with pytest.raises(RecipeError, match="a classifier needs as many classes as its head"):
        checked(recipe, HEAD, num_labels=5)
    heads = [name for name, _ in network.named_parameters() if not name.startswith(f"{network.base_model_prefix}.")]
    if len(heads) > 1:
        spoiled = spoil(tmp_path / "head", tmp_path / "half", lambda tensors: tensors.pop(heads[-1]))
        with pytest.raises(RecipeError, match=f"lacks 1 of the network's tensors: {heads[-1]}"):
            checked(recipe_of(spoiled), HEAD, num_labels=2)


PACKED = ("Linear4bit", "Linear8bit")


@pytest.mark.parametrize("way", ["nf4", "int8", "float32", "bfloat16", "uint8"])
@pytest.mark.parametrize("head", [HEAD, TOKEN_HEAD], ids=["sequence", "token"])
@pytest.mark.parametrize("model_type", ["llama", "bert", "distilbert"])
def test_a_new_head_is_not_packed(tmp_path: Path, model_type: str, head: Head, way: str) -> None:
    """It is trained whole. Those of words, and of encoders, have a bias."""
    sizes: dict[str, Any] = {"distilbert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}}.get(
        model_type, {}
    )
    auto = AutoModelForCausalLM if model_type == "llama" else transformers.AutoModelForMaskedLM
    folder = made(tmp_path / "base", model_type, auto, **sizes, max_position_embeddings=64)
    model: dict[str, Any] = {"quantization": way}
    if way not in ("nf4", "int8"):
        # Packed weights lie on the disk as this type; as a float they may look like NaN.
        storage = getattr(torch, way)
        packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=storage)
        whole, folder = auto.from_pretrained(folder, quantization_config=packing), tmp_path / "stored"
        first = next(module for module in whole.modules() if type(module).__name__ == "Linear4bit")
        if storage.is_floating_point:
            first.weight.data[0] = torch.nan
        whole.save_pretrained(folder)
        AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
        model = {}
    recipe = recipe_of(folder, model=model, lora={"rank": 2})
    config = resolve_model_config(recipe, head, num_labels=3)
    check_pretrained(recipe, config, head).check_values()  # type: ignore[union-attr]
    network: Any = build_model(recipe, config, head)
    kinds = {name: type(module).__name__ for name, module in network.named_modules()}
    body = f".{network.base_model.model.base_model_prefix}."
    adapted = {kind for name, kind in kinds.items() if body in name and name.endswith(".base_layer")}
    assert adapted == {"Linear8bit" if way == "int8" else "Linear4bit"}
    assert not {kind for name, kind in kinds.items() if body not in name} & set(PACKED)
    assert any("modules_to_save" in name and p.requires_grad for name, p in network.named_parameters())


ROBERTAS = ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "xlm-roberta-xl", "data2vec-text")


@pytest.mark.parametrize("model_type", [*ROBERTAS, "longformer", "mpnet", "ibert", "esm", "bert", "electra"])
def test_a_row_is_at_most_what_the_network_can_place(tmp_path: Path, model_type: str) -> None:
    """Some networks number tokens from behind the padding token, so that two positions of 18 are not for tokens."""
    sizes: dict[str, Any] = {"max_position_embeddings": 18, "pad_token_id": 1}
    sizes |= {"attention_window": [8, 8]} if model_type == "longformer" else {}
    folder = made(tmp_path / "base", model_type, AutoModelForSequenceClassification, **sizes)
    longest = 18 if model_type in ("bert", "electra") else 16
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    network(torch.full((1, longest), 7))
    with pytest.raises((IndexError, RuntimeError)):
        network(torch.full((1, longest + 1), 7))
    for length in (longest, longest + 1):
        recipe = recipe_of(folder, data={"train": stories("train", limit=8), "sequence_length": length})
        if length == longest:
            assert longest_row(resolve_model_config(recipe, HEAD, num_labels=2)) == length
            continue
        with pytest.raises(
            RecipeError, match=f"knows {longest} positions .* Set data.sequence_length to at most {longest}"
        ):
            resolve_model_config(recipe, HEAD, num_labels=2)
    assert load_model(str(folder)).longest == longest
    assert small_sizes(network.config, 16)["max_position_embeddings"] == 18
    if model_type not in ("roberta", "bert"):
        return
    documents = tmp_path / "documents.csv"
    documents.write_text("text,label\n" + "".join(f"{'one two three ' * 20}{n},{n % 2}\n" for n in range(8)))
    made_here = make_recipe(Project("classify", str(folder), str(documents), output=str(tmp_path / "run")), [])
    assert made_here.recipe.data.sequence_length == longest


@pytest.mark.parametrize(("model_type", "head"), [("roberta", NEXT_TOKEN), ("roberta", HEAD), ("mpnet", HEAD)])
def test_a_new_network_has_positions_for_a_row(model_type: str, head: Head) -> None:
    """Though its padding token is not that of the published ones, or there is none."""
    config = {"model_type": model_type, **SIZES}
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert tokenizer.pad_token_id is None
    tree = {**recipe_of(MODEL).model_dump(mode="json"), "tokenizer": MODEL, "model": {"config": config}}
    recipe = validate_recipe(tree)
    found = resolve_model_config(recipe, head, tokenizer=tokenizer)
    build_model(recipe, found, head)(torch.full((1, 32), 7))


def test_a_language_models_head_is_not_new(tmp_path: Path) -> None:
    folder = made(tmp_path / "base", "llama", transformers.AutoModel, num_key_value_heads=2)
    with pytest.raises(RecipeError, match=r"lacks 1 of the network's tensors: lm_head\.weight"):
        checked(recipe_of(folder))


# ---------------------------------------------------------------- adapters


def test_an_adapter_that_lacks_a_tensor(tmp_path: Path) -> None:
    recipe = recipe_of(MODEL, lora={"rank": 2})
    built(recipe).save_pretrained(tmp_path / "adapter")  # type: ignore[operator]
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    tensors = load_file(file)
    gone = next(name for name in tensors if ".lora_A" in name)
    del tensors[gone]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lacks 1 of the adapter's tensors, such as {gone}"):
        lora_adapters.open_adapter(base, tmp_path / "adapter")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"{file} cannot be read"):
        lora_adapters.open_adapter(base, tmp_path / "adapter")


# ---------------------------------------------------------------- damaged files


def half(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def a_part_of_three(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(folder, max_shard_size="400KB")
    next(folder.glob("model-00002-of-*")).unlink()


@pytest.mark.parametrize("verb", ["train", "generate", "eval"])
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (half, "model.safetensors cannot be read, it is damaged or incomplete"),
        (pickled, "holds weights as a pickle only (pytorch_model.bin), which can run code when it is read"),
        (a_part_of_three, "which its index names. Take a complete copy"),
    ],
    ids=["truncated", "pickle", "part missing"],
)
def test_damaged_files_are_named(
    place: Place, capsys: pytest.CaptureFixture[str], verb: str, damage: Callable[[Path], None], says: str
) -> None:
    folder = place.folder / "model"
    shutil.copytree(MODEL, folder)
    damage(folder)
    if verb == "train":
        with pytest.raises(RecipeError) as caught:
            run_here(validate_file(place.recipe(model={"config": None, "name": str(folder)})))
        said = str(caught.value)
    else:
        words = ["--prompt", "x"] if verb == "generate" else ["--data", str(place.folder / "train.jsonl")]
        assert main.main([verb, str(folder), *words]) == 2
        said = capsys.readouterr().err.removeprefix(f"Opening {folder}.\n")
        assert said.count("\n") == 2
    assert str(folder) in said
    assert says in said


def validate_file(file: Path) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(file.read_text())


def spoil_value(value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[UP][3, 5] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_numbers_that_are_not_finite_are_found(tmp_path: Path, value: float, dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn and value == value:
        value = float("nan")  # it has no infinity

    def change(tensors: Tensors) -> None:
        spoil_value(value)(tensors)
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}

    folder = spoil(MODEL, tmp_path / "spoiled", change)
    weights = pretrained_files.Weights(folder, (), frozenset())
    found = [weights.first_not_finite(rank, 3) for rank in range(3)]
    (position,) = [number for number in found if number is not None]
    assert position == sorted(load_file(folder / "model.safetensors")).index(UP)
    with pytest.raises(RecipeError, match=f"model.safetensors: {UP} holds 1 numbers that are NaN or infinite"):
        weights.check_values()
    pretrained_files.Weights(Path(MODEL), (), frozenset()).check_values()


def test_every_rank_refuses_weights_that_are_not_finite(place: Place) -> None:
    """Whichever rank it was that looked at them."""
    folder = spoil(MODEL, place.folder / "spoiled", spoil_value(float("nan")))
    recipe = place.recipe(model={"config": None, "name": str(folder)})
    assert_refused(start(place, recipe), f"{folder}/model.safetensors: {UP} holds 1 numbers that are NaN or infinite")
    assert not place.files()


def test_generate_refuses_weights_that_are_not_finite(tmp_path: Path) -> None:
    folder = spoil(MODEL, tmp_path / "spoiled", spoil_value(float("inf")))
    with pytest.raises(RecipeError, match=f"model.safetensors: {UP} holds 1 numbers"):
        load_model(str(folder))


def test_what_is_not_read_may_be_infinite(tmp_path: Path) -> None:
    more = {"model.layers.0.self_attn.masked_bias": torch.full((3,), -torch.inf)}
    folder = spoil(MODEL, tmp_path / "more", lambda tensors: tensors.update(more))
    checked(recipe_of(folder)).check_values()


# ---------------------------------------------------------------- names and configurations


def test_a_broken_configuration_is_not_the_tokenizers_fault(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama",')
    recipe = recipe_of(tmp_path / "model", data=small(tmp_path))
    with pytest.raises(ValueError, match=rf"{tmp_path}/model/config\.json is no valid JSON: .*model's configuration"):
        CAUSAL_LM.build_data(recipe, True)


# ---------------------------------------------------------------- code that ships with a model


@pytest.fixture
def with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose class is its own, with a file that is written when its code runs."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(tmp_path / 'ran')!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    return folder


@pytest.mark.parametrize("verb", ["generate", "eval", "train"])
def test_nobody_is_asked_whether_code_may_run(
    place: Place, with_code: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "y")  # what `yes |` would answer
    ran = with_code.parent / "ran"
    if verb == "train":
        with pytest.raises(ValueError, match="custom code"):
            run_here(validate_file(place.recipe(model={"config": None, "name": str(with_code)})))
    else:
        words = ["--prompt", "Once", "--max-new-tokens", "2"]
        words = words if verb == "generate" else ["--data", str(place.folder / "train.jsonl")]
        assert main.main([verb, str(with_code), *words]) == 2
        assert "custom code" in capsys.readouterr().err
        assert not ran.exists()
        assert main.main([verb, str(with_code), *words, "--trust-remote-code"]) == 0
        assert ran.exists()
        return
    assert not ran.exists()


TIED = ("single", "fsdp", "zero3")


def parted(folder: Path) -> Path:
    """A model whose config.json ties embedding and head, and whose file holds two that differ."""

    def add(tensors: Tensors) -> None:
        torch.manual_seed(1)
        tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"]) / 10

    return spoil(made(folder / "tied", "llama", tie_word_embeddings=True), folder / "parted", add)


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    folder = launcher.shared / "parted-ends"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            parted(folder)
    tree = recipe_of(folder / "parted").model_dump(mode="json", exclude_unset=True)
    tree |= {"batch": {"global_size": 4, "micro_size": 2}, "length": {"steps": 2}, "log": {"every_steps": 1}}
    tree["data"] |= {"validation": stories("validation", limit=4)}
    return {key: {"parted": tree, "parted_as_it_is": {**tree, "length": {"steps": 0}}} for key in TIED}


@pytest.mark.parametrize("backend", [pytest.param(b, marks=pytest.mark.xdist_group(b)) for b in TIED])
def test_ends_that_differ_in_the_file_are_trained_and_written_as_two(launcher: Launcher, backend: str) -> None:
    """What transformers itself computes with the file is where every backend starts; `model/` is what it trained."""
    folder, jobs = launcher.shared / "parted-ends", LAUNCHED_RUNS(launcher)[backend]
    tree, runs = jobs["parted"], launcher.many(backend, jobs)
    run = runs["parted"].check()
    wrong = run_losses(folder / "parted", launcher, tree, tied=True)
    right = run_losses(folder / "parted", launcher, tree, tied=False)
    assert abs(wrong - right) > 1e-2
    evaluated = runs["parted_as_it_is"].check()
    assert evaluated.validation() == pytest.approx(right, rel=1e-5)
    config = json.loads((run.directory / "model" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    written = load_file(run.directory / "model" / "model.safetensors")
    assert not torch.equal(written["lm_head.weight"], written["model.embed_tokens.weight"])
    assert run_losses(run.directory / "model", launcher, tree, tied=False) == pytest.approx(run.validation(), rel=1e-5)


def run_losses(folder: Path, launcher: Launcher, tree: dict[str, Any], *, tied: bool) -> float:
    """The mean validation loss of a folder's network, by transformers."""
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight" if tied else "lm_head.weight"]
    network.lm_head.weight = torch.nn.Parameter(head)
    recipe = validate_recipe({**tree, "output": {"dir": str(launcher.shared / "unused")}})
    rows = CAUSAL_LM.build_data(recipe, True).validation
    assert rows is not None
    total = targets = 0.0
    with torch.no_grad():
        for row in range(len(rows)):
            batch = rows.batch(np.array([row]))
            told = {name: batch[name] for name in ("input_ids", "position_ids")}
            logits = network.eval()(use_cache=False, **told).logits
            total += float(torch.nn.functional.cross_entropy(logits[0], batch["targets"][0], reduction="sum"))
            targets += int((batch["targets"] != -100).sum())
    return total / targets


def test_an_adapter_beside_a_whole_model_is_refused(tmp_path: Path) -> None:
    """transformers would put it into the network and freeze the rest."""
    folder = made(tmp_path / "model", "llama")
    network = AutoModelForCausalLM.from_pretrained(folder)
    adapted = peft.get_peft_model(network, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder)
    opened = AutoModelForCausalLM.from_pretrained(folder)
    assert any("lora_A" in name for name, _ in opened.named_parameters())
    for lora in (None, {"rank": 2}):
        recipe = recipe_of(folder, lora=lora)
        with pytest.raises(RecipeError, match="a whole model and an adapter beside it"):
            check_pretrained(recipe, resolve_model_config(recipe), NEXT_TOKEN)
    # Where a model is opened, the adapter would be all that is meant.
    for base in (None, str(folder)):
        with pytest.raises(RecipeError, match="a whole model and an adapter beside it"):
            load_model(str(folder), base=base)
    # Whatever else changes the network that config.json describes.
    (folder / "adapter_config.json").unlink()
    auto = AutoModelForCausalLM

    class Freezing:
        from_config = auto.from_config

        @staticmethod
        def from_pretrained(*args: Any, **options: Any) -> Any:
            network, told = auto.from_pretrained(*args, **options)
            network.model.embed_tokens.requires_grad_(False)
            return network, told

    config = AutoConfig.from_pretrained(folder)
    options = {"trust_remote_code": False, "dtype": "auto", "device_map": "meta"}
    pretrained_files.load_pretrained(auto, str(folder), config, **options)
    with pytest.raises(RecipeError, match="1 of its 21 tensors are frozen"):
        pretrained_files.load_pretrained(Freezing, str(folder), config, **options)


def test_a_model_without_the_files_of_its_tokenizer(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", "gpt2", n_embd=16, n_head=2, n_layer=1)
    for file in [path for path in folder.iterdir() if "token" in path.name]:
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"The tokenizer of {folder} knows no text, .* Copy them from the model"):
        load_model(str(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(FinetuneError, match=r"cannot be opened|no tokenizer that opens"):
        load_model(str(folder))
    if name.startswith("g"):
        recipe = recipe_of(folder)
        with pytest.raises(FinetuneError, match="nested too deeply"):
            check_pretrained(recipe, resolve_model_config(recipe), NEXT_TOKEN)


@pytest.mark.parametrize(("number", "says"), [(600, "tokens up to 600, but the model's .* holds 512"), (10**9, "dam")])
def test_a_tokenizer_needs_rows_up_to_its_largest_number(tmp_path: Path, number: int, says: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] = number
    (folder / "tokenizer.json").write_text(json.dumps(content))

    recipe = recipe_of(folder)
    with pytest.raises(FinetuneError, match=says):
        resolve_model_config(recipe, tokenizer=load_tokenizer(recipe))
    with pytest.raises(CheckpointError, match=f"The tokenizer of {folder} numbers .*{says}"):
        load_model(str(folder))
    if number == 600:
        own = recipe_of(folder, model={"name": None, "config": {"model_type": "llama"}}, tokenizer=str(folder))
        assert resolve_model_config(own, tokenizer=load_tokenizer(own)).vocab_size == 601
        assert with_vocabulary_size(own).model.config == {"model_type": "llama", "vocab_size": 601}


def test_a_token_for_images_needs_no_row(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "model")
    image = {"extra_special_tokens": {"image_token": "<image>"}}
    AutoTokenizer.from_pretrained(MODEL, **image).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(recipe_of(tmp_path / "model"))
    assert tokenizer.get_vocab()["<image>"] == 512
    assert resolve_model_config(recipe_of(tmp_path / "model"), tokenizer=tokenizer).vocab_size == 512
    load_model(str(tmp_path / "model"))

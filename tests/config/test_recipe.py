"""The recipe plane: layers, overrides, strictness, and that nothing in it is dead."""

import ast
import json
import re
import shlex
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
import yaml
from forkserver import ForkServer
from harness import ROOT
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inside import run_here
from pydantic import ValidationError
from testdata import MODEL
from transformers.modeling_rope_utils import RopeParameters

from finetune.cli.main import main
from finetune.config.recipe import (
    _OF_SEVERAL_KINDS,
    RECIPE_FIELDS,
    divisors,
    dump_recipe,
    json_schema,
    load_recipe,
    read_recipe,
    recipe_layers,
    validate_recipe,
)
from finetune.config.recipe_schema import Recipe, Section, is_given
from finetune.diagnostics.explain import recipe_values
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.distributed.strategies import deepspeed_config
from finetune.tasks.task_lookup import BUILT_IN
from finetune.training import api
from finetune.utils.errors import BackendError, RecipeError

WHOLE: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "tokenizer": {"vocab_size": 300},
    "data": {"train": [{"sample": 10}, {"sample": 20}]},
    "length": {"steps": 1},
}


def written(folder: Path, text: str | dict[str, Any]) -> Path:
    file = folder / "recipe.yaml"
    file.write_text(text if isinstance(text, str) else yaml.safe_dump(text), encoding="utf-8")
    return file


def refusal(tree: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as caught:
        validate_recipe({**WHOLE, **tree}, tasks=BUILT_IN)
    return str(caught.value)


@pytest.mark.parametrize("key", ["tokenizer", "checks"])
def test_null_leaves_a_section_out(tmp_path: Path, key: str) -> None:
    file = written(tmp_path, {**WHOLE, "model": {"name": "some/model"}, "tokenizer": {"vocab_size": 300}})
    assert getattr(load_recipe(file, [f"{key}=null"]), key) == getattr(Recipe(), key)
    assert load_recipe(file, ["tokenizer=null", "tokenizer.name=words"]).tokenizer.name == "words"


# ---------------------------------------------------------------- layers and overrides


def test_layers_defaults_then_file_then_overrides(tmp_path: Path) -> None:
    file = written(tmp_path, {**WHOLE, "optim": {"lr": 2e-3}})
    assert load_recipe(file).optim.lr == 2e-3
    assert load_recipe(file).optim.weight_decay == Recipe().optim.weight_decay
    assert load_recipe(file, ["optim.lr=1e-4"]).optim.lr == 1e-4
    assert load_recipe(file, ["optim.lr=1e-4", "optim.lr=1e-5"]).optim.lr == 1e-5


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("optim.lr=1e-4", "optim.lr", 1e-4),
        ("optim.lr=2", "optim.lr", 2.0),
        ("optim.clip_norm=null", "optim.clip_norm", None),
        ("optim.clip_norm=", "optim.clip_norm", None),
        ("log.trackers=[tensorboard, wandb]", "log.trackers", ("tensorboard", "wandb")),
        ("optim.args.betas=[0.9, 0.95]", "optim.args", {"betas": [0.9, 0.95]}),
        ("sample.prompt=Once upon = a time", "sample.prompt", "Once upon = a time"),
        ("data.train.1.weight=2.5", "data.train.1.weight", 2.5),
        ("data.train.2.sample=7", "data.train.2.sample", 7),
        ("data.validation.0.path=x.txt", "data.validation.0.path", "x.txt"),
        ("model={config: {model_type: gpt2}}", "model.config", {"model_type": "gpt2"}),
        ("seed=0", "seed", 0),
    ],
)
def test_override(tmp_path: Path, override: str, key: str, value: Any) -> None:
    found: Any = load_recipe(written(tmp_path, WHOLE), [override])
    for part in key.split("."):
        found = found[int(part)] if part.isdigit() else getattr(found, part)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optim.lr", "not of the form key.key=value"),
        ("=3", "not of the form key.key=value"),
        ("optim..lr=3", "not of the form key.key=value"),
        ("optim.lr=[1", "not valid YAML"),
        ("data.train.7.sample=1", "is a list of 2; '7' is not one of 0 to 2"),
        ("data.train.first.sample=1", "'first' is not one of"),
        ("data.train.²=1", "'²' is not one of"),
        ("seed.x.y=1", "'seed' is a number and has no keys"),
        ("optim.lrr=1", "optim.lrr: unknown key, did you mean 'lr'?"),
    ],
)
def test_override_that_cannot_be(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)):
        load_recipe(written(tmp_path, {**WHOLE, "seed": 1}), [override])


def test_override_changes_one_place_of_a_repeated_part(tmp_path: Path) -> None:
    text = yaml.safe_dump({**WHOLE, "data": None}).replace(
        "data: null", "data:\n  train: &same [{sample: 10}]\n  validation: *same"
    )
    recipe = load_recipe(written(tmp_path, text), ["data.train.0.limit=5"])
    assert recipe.data.train[0].limit == 5
    assert recipe.data.validation[0].limit is None


# ---------------------------------------------------------------- what is refused, and how


def test_all_problems_at_once() -> None:
    text = refusal({"optim": {"lrr": 1, "weight_decay": -1}, "seed": "x", "shedule": {}})
    assert "4 problems" in text
    for key in (
        "optim.lrr: unknown key",
        "optim.weight_decay: ",
        'seed: input should be a valid integer, got "x"',
    ):
        assert key in text
    assert "shedule: unknown key, did you mean 'schedule'?" in text


def test_conflicts_between_sections_at_once() -> None:
    text = refusal(
        {
            "length": {"steps": 1, "epochs": 2},
            "tokenizer": {},
            "task": {"name": "causal_lmm"},
        }
    )
    assert "3 problems" in text
    assert "length: give exactly one of steps, epochs and tokens" in text
    assert "tokenizer: a model from `model.config` brings none" in text
    assert "no task 'causal_lmm', did you mean 'causal_lm'?" in text


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"batch": {"micro_size": "8"}}, "batch.micro_size: got \"8\"; allowed are a whole number above 0, or 'auto'"),
        ({"batch": {"micro_size": True}}, "batch.micro_size: got true; allowed are a whole number above 0, or 'auto'"),
        ({"batch": {"micro_size": 8.0}}, "batch.micro_size: got 8.0; allowed are a whole number above 0, or 'auto'"),
        ({"batch": {"micro_size": 0}}, "got 0; allowed are a whole number above 0, or 'auto'"),
        ({"optim": {"lr": "fast"}}, 'optim.lr: input should be a valid number, got "fast"'),
        ({"optim": {"lr": float("inf")}}, "optim.lr: input should be a finite number"),
        ({"optim": {"clip_norm": float("nan")}}, "optim.clip_norm: input should be a finite number"),
        ({"output": {"overwrite": 1}}, "output.overwrite: input should be a valid boolean, got 1"),
        ({"output": {"dir": ""}}, "output.dir: "),
        ({"seed": -1}, "seed: "),
        ({"seed": 2**63}, "seed: "),
        ({"data": {"sequence_length": 10**8}}, "data.sequence_length: input should be less than or equal to 16777216"),
        ({"precision": "bf1"}, "'auto', 'fp32', 'bf16' or 'fp16', got \"bf1\""),
        ({"precision": "x" * 500}, "x …"),
        (
            {"task": {"class_weights": {"billing": 2}}},
            "got {\"billing\": 2}; allowed are 'balanced', or a list with one number above 0 for each class",
        ),
        ({"task": {"class_weights": [1, "a", -1]}}, 'task.class_weights: got [1, "a", -1]; allowed are'),
        ({"model": {"gradient_checkpointing": "all"}}, "got \"all\"; allowed are true, false or 'selective'"),
        ({"data": {"train": 3}}, "data.train: this is a list, such as [first, second], got 3"),
        ({"batch": 32}, "batch: this is a section: write its keys below it (global_size, micro_size), got 32"),
        ({"optim": {"args": 4}}, "optim.args: this is a mapping, such as {key: value}, got 4"),
        (
            {"data": {"train": [{"sample": 3, "path": "x"}]}},
            "data.train.0: give exactly one of sample, path and hub",
        ),
        ({"data": {"train": [{"sample": 3, "split": "test"}]}}, "`split` is of a source with path or hub; remove it"),
        *(
            ({"data": {"train": [{**source, key: value}]}}, f"`{key}` is of a source with hub; remove it")
            for source in ({"path": "x"}, {"sample": 3})
            for key in ("hub_config", "revision")
            for value in ("a", "train")
        ),
        (
            {"data": {"train": [{"path": "x", "label_field": "a"}]}},
            "data.train.0.label_field: causal_lm reads no labels; remove it",
        ),
        ({"data": {"train": [{"sample": 3, "txt_field": "x"}]}}, "did you mean 'text_field'?"),
        ({"model": {"name": "x", "config": {"model_type": "llama"}}}, "model: give `name`"),
        ({"model": {"config": {}}}, "`config` needs `model_type`"),
        ({"model": {}}, "model: give `name` (pretrained weights) or `config`"),
        ({"tokenizer": None}, "tokenizer: a model from `model.config` brings none"),
        (
            {"data": {**WHOLE["data"], "sequence_length": 1}},
            "data.sequence_length: input should be greater than or equal to 2, got 1",
        ),
        ({"tokenizer": {"vocab_size": 20}}, "greater than or equal to 260, got 20"),
        ({"optim": {"lr_scaling": "linear"}}, "`lr_scaling` and `reference_batch` go together"),
        ({"schedule": {"warmup_steps": 1, "warmup_fraction": 0.1}}, "not both"),
        ({"length": {}}, "length: give exactly one of steps, epochs and tokens (got none)"),
        ({"data": {}}, "data.train: name at least one source"),
        ({"length": {"steps": 0}, "data": {}}, "data.validation: name at least one source"),
        ({"task": {"name": "sequence_classification"}}, "set `padded`"),
        ({"task": {"name": "sequence_classification"}, "sample": {}}, "a classifier writes no text"),
        (
            {"task": {"name": "sequence_classification"}, "data": {"train": [{"sample": 3, "format": "messages"}]}},
            "need a `chat` section; sequence_classification reads no conversations; remove them",
        ),
    ],
)
def test_refused(tree: dict[str, Any], says: str) -> None:
    assert says in refusal(tree)


def test_a_key_of_several_kinds_has_one_problem() -> None:
    """And every such key says what it takes: pydantic's own words are those of one kind each."""
    annotations = {key: field.annotation for key, field in RECIPE_FIELDS.items()}
    unions = [key for key, annotation in annotations.items() if get_origin(annotation) in (Union, UnionType)]
    several = [key for key in unions if len({*get_args(annotations[key])} - {type(None)}) > 1]
    assert {*several} == {*_OF_SEVERAL_KINDS}
    for key in _OF_SEVERAL_KINDS:
        section, _, name = key.partition(".")
        problems = [text for text in refusal({section: {name: {"a": 1}}}).splitlines() if f"{key}:" in text]
        assert len(problems) == 1
        assert 'got {"a": 1}; allowed are ' in problems[0]


# Each part holds the one before three times.
BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}, *a{i - 1}]\n" for i in range(1, 20))
MERGED_BOMB = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i}\n  <<: [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("optim: {lr: 1, lr: 2}", "recipe.yaml:1: the recipe is not valid YAML: key 'lr' is given twice"),
        ("optim:\n  lr: 1\noptim:\n  lr: 2", "key 'optim' is given twice"),
        ("? [a, b]\n: 1", "is not a text"),
        ("- a\n- b", "must hold keys and values, got a list"),
        ("seed: [1", "is not valid YAML"),
        ("seed: !!python/object:os.system x", "is not valid YAML"),
        ("optim: &o {args: *o}", "recipe.yaml:1: the recipe is not valid YAML: a part contains itself by an alias"),
        (
            "optim:\n  lr: [1\nseed: 1",
            "recipe.yaml:3: the recipe is not valid YAML: while parsing a flow sequence that begins on line 2",
        ),
        ("seed: \x00", "recipe.yaml:1: the recipe is not valid YAML: the character '\\x00' is not allowed"),
        pytest.param(BOMB, "its aliases repeat 43 values to 6.1e+09", id="alias bomb"),
        pytest.param(MERGED_BOMB, "its aliases repeat", id="bomb of merged keys"),
        pytest.param("[" * 3000, "nested too deeply", id="nested"),
        pytest.param(f"seed: {'9' * 5000}", "a value cannot be read: Exceeds the limit", id="a number of 5,000 digits"),
        ("seed: 2026-13-45", "a value cannot be read: month must be in 1..12"),
        pytest.param("a: [x]\n" * 10**6, "it has 7,000,000 characters, and a configuration at most", id="7 MB"),
    ],
)
def test_file_that_is_no_recipe(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(says)) as caught:
        load_recipe(written(tmp_path, text))
    assert "\n" not in str(caught.value)
    assert "<unicode string>" not in str(caught.value)


def test_a_number_of_thousands_of_digits_from_python() -> None:
    assert "a value cannot be read: Exceeds the limit" in refusal({"seed": 10**5000})


def test_merged_keys_stand_behind_a_sections_own(tmp_path: Path) -> None:
    text = yaml.safe_dump({key: value for key, value in WHOLE.items() if key != "data"}) + (
        "data:\n  train: [{<<: &of {path: a.txt, weight: 2.0}, weight: 3.0}, {<<: *of, path: b.txt}]\n"
    )
    first, second = load_recipe(written(tmp_path, text)).data.train
    assert (first.path, first.weight, second.path, second.weight) == ("a.txt", 3.0, "b.txt", 2.0)


def test_problems_name_their_places(tmp_path: Path) -> None:
    """A file and its line, or what of the command line did it; a line each, for people and in the text."""
    file = written(tmp_path, yaml.safe_dump({**WHOLE, "data": None}) + "optim:\n  lrr: 1\n  clip_norm: x\n")
    above = len(file.read_text().splitlines()) - 3
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["seed=1", "optim.lr=fast", "shedule.name=linear"])
    head, *problems = caught.value.lines
    assert head == f"{file} has 5 problems:"
    assert str(caught.value).splitlines() == [head, *problems]
    for place, problem in (
        (f"{file}:{above + 2}", "optim.lrr: unknown key, did you mean 'lr'?"),
        (f"{file}:{above + 3}", "optim.clip_norm: input should be a valid number"),
        ("optim.lr=fast (command line)", "optim.lr: input should be a valid number"),
        ("shedule.name=linear (command line)", "shedule: unknown key, did you mean 'schedule'?"),
    ):
        assert sum(line.startswith(f"  {place}: {problem}") for line in problems) == 1, problems


def test_a_conflict_is_blamed_on_what_brought_it(tmp_path: Path) -> None:
    file = written(tmp_path, {**WHOLE, "batch": {"micro_size": "auto"}, "length": {"steps": 8}})
    (line,) = [n for n, text in enumerate(file.read_text().splitlines(), 1) if "micro_size" in text]
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["length.steps=0", "seed=1"])
    assert str(caught.value).startswith("length.steps=0 (command line): batch.micro_size: `auto` tries training steps")
    file.write_text(file.read_text().replace("steps: 8", "steps: 0"))
    with pytest.raises(RecipeError) as caught:
        load_recipe(file, ["seed=1"])
    assert str(caught.value).startswith(f"{file}:{line}: batch.micro_size: `auto` tries training steps")


CLASSES = {"task": {"name": "sequence_classification", "loss": "a:b"}, "data": {**WHOLE["data"], "packing": "padded"}}
PROMPTS = {"eval": {"prompts": [{"sample": 1}, {"sample": 3}], "metrics": ["f1"]}}


@pytest.mark.parametrize(
    ("in_file", "typed", "replaced"),
    [
        ({"length": {"epochs": 1}}, "length.steps=20", "length.epochs: 1"),
        ({"length": {"tokens": 5}}, "length.steps=0", "length.tokens: 5"),
        ({}, "model=x", "model.config: {"),
        ({"model": {"name": "x"}}, "model.config={model_type: a}", 'model.name: "x"'),
        ({}, "tokenizer.name=x", "tokenizer.vocab_size: "),
        ({"schedule": {"warmup_steps": 3}}, "schedule.warmup_fraction=0.1", "schedule.warmup_steps: 3"),
        ({}, "data.train.1.path=x", "data.train.1.sample: "),
        ({"eval": {"every_steps": 3}}, "eval.per_epoch=2", "eval.every_steps: 3"),
        ({"checkpoint": {"per_epoch": 2}}, "checkpoint.every_steps=3", "checkpoint.per_epoch: 2"),
        ({"data": {**WHOLE["data"], "validation": [{"path": "x"}]}}, "data.validation.0.hub=x",
         'data.validation.0.path: "x"'),
        (PROMPTS, "eval.prompts.1.path=x", "eval.prompts.1.sample: 3"),
        (CLASSES, "task.class_weights=balanced", 'task.loss: "a:b"'),
        (CLASSES, "task.label_smoothing=0.1", 'task.loss: "a:b"'),
        ({"model": {**WHOLE["model"], "freeze": ["a"]}}, "lora.rank=8", 'model.freeze: ["a"]'),
        ({"lora": {"rank": 8}}, "model.freeze=a", 'lora: {"rank": 8}'),
        ({"model": {**WHOLE["model"], "fp8": "emulated"}}, "lora=true", 'model.fp8: "emulated"'),
    ],
)  # fmt: skip
def test_override_of_a_key_that_excludes_one_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], in_file: dict[str, Any], typed: str, replaced: str
) -> None:
    """It replaces it, and says so, with the line of the file; `explain` names it as who set both."""
    file = written(tmp_path, {**WHOLE, **in_file})
    recipe = load_recipe(file, ["seed=1", typed], BUILT_IN)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{typed} replaces {replaced}")
    assert load_recipe(file, ["seed=1", typed], BUILT_IN, quiet=True) == recipe
    assert capsys.readouterr().err == ""
    key = replaced.partition(":")[0]
    (line,) = re.findall(r" of .*recipe\.yaml:(\d+)$", said)
    assert file.read_text().splitlines()[int(line) - 1].lstrip("- ").startswith(key.rpartition(".")[2])
    assert not is_given(recipe, key)
    assert is_given(recipe, typed.partition("=")[0])
    layers = recipe_layers(read_recipe(file), [typed], file, quiet=True)
    (value,) = [value for value in recipe_values(recipe, str(file), [typed], layers, {}) if value.key == key]
    assert value.settings[-1].place == typed


def test_every_group_of_exclusive_keys_is_replaced_by_an_override() -> None:
    """The groups above are all that the sections declare."""
    declared = {(section.__name__, group) for section in Section.__subclasses__() for group in section.exclusive}
    assert declared == {
        ("LengthSection", ("steps", "epochs", "tokens")),
        ("ModelSection", ("name", "config")),
        ("TokenizerSection", ("name", "vocab_size")),
        ("ScheduleSection", ("warmup_steps", "warmup_fraction")),
        ("Source", ("sample", "path", "hub")),
        ("EvalSection", ("every_steps", "per_epoch")),
        ("CheckpointSection", ("every_steps", "per_epoch")),
        ("Recipe", ("task.class_weights", "task.loss")),
        ("Recipe", ("task.label_smoothing", "task.loss")),
        ("Recipe", ("model.freeze", "lora")),
        ("Recipe", ("model.fp8", "lora")),
    }


def test_keys_that_exclude_each_other_on_one_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both in the file, in one override, or in two: nobody knows which is meant. One that is taken back is not."""
    file = written(tmp_path, {**WHOLE, "length": {"steps": 3, "epochs": 2}})
    for typed, says in (
        ([], f"{file}:"),
        (["length={steps: 3, epochs: 2}"], "length={steps: 3, epochs: 2} (command line): length: give exactly one"),
        (
            ["length.steps=3", "length.epochs=2"],
            "length.steps=3 and length.epochs=2 exclude each other: length: give exactly",
        ),
        (["model.name=a", "length=null", "model.config={model_type: x}"], "model.name=a and model.config={model_type"),
        (["data.train=a.txt", "data.train.0.hub=b"], "data.train=a.txt and data.train.0.hub=b exclude each other"),
        (["lora=true", "model.freeze=a"], "lora=true and model.freeze=a exclude each other: model.freeze: with a"),
    ):
        with pytest.raises(RecipeError) as caught:
            load_recipe(file, typed)
        assert str(caught.value).startswith(says)
    capsys.readouterr()
    assert load_recipe(file, ["length.steps=3", "length.steps=null", "length.tokens=2"]).length.tokens == 2
    assert load_recipe(file, ["length.steps=3", "length.steps=4"]).length.steps == 4
    assert load_recipe(written(tmp_path, {**WHOLE, "length": {"epochs": 2}}), ["length.epochs=null", "length.steps=3"])
    assert capsys.readouterr().err.count("replaces") == 1


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nope\.yaml: No such file or directory\. Name a file"):
        load_recipe(tmp_path / "nope.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"seed: \xff")
    with pytest.raises(RecipeError, match="not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")
    with pytest.raises(RecipeError, match="Is a directory"):
        load_recipe(tmp_path)


def test_frozen() -> None:
    recipe = validate_recipe(WHOLE)
    with pytest.raises(ValidationError):
        recipe.seed = 3
    with pytest.raises(ValidationError):
        recipe.optim.lr = 3.0
    with pytest.raises(TypeError):
        recipe.data.train[0] = recipe.data.train[1]


def test_yaml_means_what_people_write(tmp_path: Path) -> None:
    file = written(tmp_path, yaml.safe_dump(WHOLE) + "optim: {lr: 1e-4, weight_decay: .5, clip_norm: 1.}\n")
    assert load_recipe(file).optim.model_dump(include={"lr", "weight_decay", "clip_norm"}) == {
        "lr": 1e-4,
        "weight_decay": 0.5,
        "clip_norm": 1.0,
    }


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 5000))
def test_divisors(number: int) -> None:
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


# ---------------------------------------------------------------- dump and schema

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    [
        "1e-4",
        "1e5",
        ".5",
        "null",
        "no",
        "~",
        "12:30",
        "0x1f",
        "2020-01-01",
        "[a]",
        "a: b",
        "# x",
        " x ",
        "a\nb",
        "=",
        "<<",
        "a\x85b",
        "\u2028",
        "\r",
    ]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, suppress_health_check=list(HealthCheck))
@given(
    args=st.dictionaries(TEXTS, PLAIN, max_size=4),
    prompt=TEXTS,
    lr=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    clip=st.none() | st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    trackers=st.lists(st.sampled_from(["tensorboard", "trackio", "wandb"]), max_size=3),
    seed=st.integers(0, 2**63 - 1),
)
def test_dump_and_load_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    args: dict[str, Any],
    prompt: str,
    lr: float,
    clip: float | None,
    trackers: list[str],
    seed: int,
) -> None:
    recipe = validate_recipe(
        {
            **WHOLE,
            "optim": {"args": args, "lr": lr, "clip_norm": clip},
            "sample": {"prompt": prompt},
            "log": {"trackers": trackers},
            "seed": seed,
        }
    )
    file = tmp_path_factory.getbasetemp() / "dumped.yaml"
    file.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(file) == recipe


def test_docs_say_of_every_key_what_its_docstring_says() -> None:
    text = (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8")
    missing = []
    for section in _sections():
        for key, facts in section.model_fields.items():
            meaning = " ".join((facts.description or "").split()).replace("|", "\\|")
            row = rf"^\| `{key}` \|.*\| {re.escape(meaning)}"
            if not re.search(row, text, re.MULTILINE) and section is not Recipe:
                missing.append(f"{section.__name__}.{key}")
    assert not missing


def _sections() -> list[type[Section]]:
    return sorted(Section.__subclasses__(), key=lambda section: section.__name__)


def test_schema_says_what_every_key_means() -> None:
    schema = json_schema()
    assert json.loads(json.dumps(schema)) == schema
    assert schema["$schema"].startswith("https://json-schema.org/")
    parts = {"Recipe": schema, **schema["$defs"]}
    assert {section.__name__ for section in _sections()} == parts.keys()
    for name, part in parts.items():
        assert part["additionalProperties"] is False
        assert part["description"], name
        for key, value in part["properties"].items():
            section = value.get("$ref", "")
            text = parts[section.rsplit("/", 1)[-1]]["description"] if section else value.get("description")
            assert text, f"{name}.{key} has no description"
            assert text.rstrip().endswith((".", "step.")), f"{name}.{key}: {text!r}"


def test_schema_command_prints_the_schema_that_ships(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed) == json_schema()
    assert main(["schema", "--path"]) == 0
    (path,) = capsys.readouterr().out.splitlines()
    renew = "finetune schema > finetune/config/recipe.schema.json"
    assert Path(path).read_text(encoding="utf-8") == printed, f"A key has changed: {renew}"


def test_show_prints_a_recipe_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "recipes" / "sample.yaml"
    assert main(["show", str(file), "optim.lr=1e-5"]) == 0
    assert load_recipe(written(tmp_path, capsys.readouterr().out)) == load_recipe(file, ["optim.lr=1e-5"])


# ---------------------------------------------------------------- short forms

SHORT = {
    "model": ("/models/x", {"name": "/models/x"}),
    "tokenizer": ("words", {"name": "words"}),
    "task": ("causal_lm", {"name": "causal_lm"}),
    "optim": ("SGD", {"name": "SGD"}),
    "schedule": ("linear", {"name": "linear"}),
    "output": ("runs/x", {"dir": "runs/x"}),
    "resume": ("must", {"mode": "must"}),
    "chat": ("plain", {"template": "plain"}),
    "sample": ("Once", {"prompt": "Once"}),
    "data": ("x.jsonl", {"train": [{"path": "x.jsonl"}]}),
    "data.train": ("x.jsonl", [{"path": "x.jsonl"}]),
    "data.train.0": ("x.jsonl", {"path": "x.jsonl"}),
    "data.validation": ({"path": "x.jsonl", "limit": 3}, [{"path": "x.jsonl", "limit": 3}]),
    "log.trackers": ("wandb", ["wandb"]),
    "resume.allow": ("data", ["data"]),
    "lora": (True, {}),
}


TYPES = {"string": str, "boolean": bool, "object": dict, "array": list, "null": type(None), "integer": int}


def fits(value: Any, schema: dict[str, Any], parts: dict[str, Any]) -> bool:
    """Whether an editor takes a value, by the words of JSON schema that stand for types and structure."""
    if "$ref" in schema:
        return fits(value, parts[schema["$ref"].rpartition("/")[2]], parts)
    if "anyOf" in schema:
        return any(fits(value, one, parts) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(fits(item, schema["items"], parts) for item in value)
    keys = schema.get("properties", {}) if isinstance(value, dict) else {}
    return all(fits(item, keys[key], parts) for key, item in value.items() if key in keys) if keys else True


@pytest.mark.parametrize("key", SHORT)
def test_a_plain_value_with_one_meaning_is_taken(tmp_path: Path, key: str) -> None:
    short, long = SHORT[key]
    base = {**WHOLE, "model": {"name": "/models/y"}, "tokenizer": {"name": "words"}, "data": {"train": [{"path": "y"}]}}

    def set_in(value: Any) -> dict[str, Any]:
        tree = json.loads(json.dumps(base))
        node: Any = tree
        *above, last = key.split(".")
        for name in above:
            node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
        node[int(last) if isinstance(node, list) else last] = value
        return tree

    expected = validate_recipe(set_in(long))
    assert validate_recipe(set_in(short)) == expected
    assert load_recipe(written(tmp_path, set_in(short))) == expected
    assert api.load_recipe(set_in(short)) == expected
    assert load_recipe(written(tmp_path, base), [f"{key}={json.dumps(short)}"]) == expected
    schema = json_schema()
    assert fits(set_in(short), schema, schema["$defs"])
    assert fits(set_in(long), schema, schema["$defs"])
    assert not fits(set_in(7), schema, schema["$defs"])


def test_a_plain_value_changes_its_key_only(tmp_path: Path) -> None:
    file = written(tmp_path, {**WHOLE, "output": {"dir": "a", "overwrite": True}})
    recipe = load_recipe(file, ["output=b", "lora=true", "lora.rank=4", "lora=false"])
    assert (recipe.output.dir, recipe.output.overwrite, recipe.lora) == ("b", True, None)


# ---------------------------------------------------------------- files of other kinds, keys of other tools


def test_a_file_of_another_kind_is_told_as_such(tmp_path: Path) -> None:
    other = {
        "a launch file": LAUNCH_FILES,
        "a DeepSpeed config": DS_CONFIGS,
        "a config of Axolotl": {"base_model": "x", "datasets": [], "sequence_len": 3, "learning_rate": 1},
        "TRL": {"model_name_or_path": "x", "learning_rate": 1, "output_dir": "x", "warmup_ratio": 0.1},
        "LLaMA-Factory": {"stage": "sft", "finetuning_type": "lora", "template": "x", "cutoff_len": 3, "dataset": "x"},
        "mixed_precision": {"compute_environment": "LOCAL_MACHINE", "mixed_precision": "bf16"},
    }
    for kind, files in other.items():
        for file in files if isinstance(files, list) else [written(tmp_path, files)]:
            with pytest.raises(RecipeError, match=f"this is .*{kind}.*not a recipe"):
                load_recipe(file)
    for file in [*SHIPPED, *DS_CONFIGS]:
        kind = "recipe" if file in SHIPPED else "DeepSpeed config"
        with pytest.raises(BackendError, match=f"this is a {kind} .*, not a launch file"):
            read_launch_file(str(file))
    with pytest.raises(RecipeError, match=r"ddp is a launch file that ships.* --config_file"):
        load_recipe("ddp")
    with pytest.raises(BackendError, match="sample is a recipe that ships, not a launch file"):
        read_launch_file("sample")


def test_no_guess_changes_what_is_trained() -> None:
    for key in ("target_module", "modules_save", "save_parts", "target_layers"):
        assert "did you mean" not in refusal({"lora": {key: ["q_proj"]}})
    assert "did you mean 'save_modules'" in refusal({"lora": {"save_module": ["lm_head"]}})


# ---------------------------------------------------------------- nothing dead


def test_every_field_is_read() -> None:
    read: set[str] = set()
    for file in (ROOT / "finetune").rglob("*.py"):
        if file.name not in ("recipe.py", "recipe_schema.py"):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            # What is called is a method of something else, such as `str.strip`.
            called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
            read |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and n not in called}
    # This section is handed to transformers whole.
    read |= RopeParameters.__annotations__.keys()
    unread = [f"{s.__name__}.{key}" for s in _sections() for key in s.model_fields if key not in read]
    assert not unread, f"nothing reads {unread}"


# ---------------------------------------------------------------- what ships

SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
LAUNCH_FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
DS_CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def test_something_ships() -> None:
    assert len(SHIPPED) >= 5
    assert len(LAUNCH_FILES) >= 13
    assert len(DS_CONFIGS) >= 5


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_recipe_opens_with_its_command(file: Path) -> None:
    first = file.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# ")
    words = first.removeprefix("# ").rstrip("\\").split()
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert words[4:6] == ["scripts/train.py", f"recipes/{file.name}"]
    assert (ROOT / words[3]).is_file()
    assert (ROOT / words[4]).is_file()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_recipe_dry_run(fork_server: ForkServer, file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file)
    more = [f"output.dir={tmp_path / 'run'}"]
    if recipe.model.name is not None:
        # What another run has made, or lies on the hub.
        more += [f"model.name={MODEL}", "data.sequence_length=512"]  # as many as it can
    more += [f"{key}.name={MODEL}" for key in recipe.frozen_models]
    if recipe.tokenizer.name is not None:
        more += [f"tokenizer.name={MODEL}"]
    code, output = fork_server.run(["scripts/train.py", str(file), *more, "--dry-run"])
    assert code == 0, output
    assert re.search(r"^network +\w+, [\d,]+ parameters", output, re.MULTILINE), output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["llama_lora", "llama_qlora", "llama_full"])
def test_recipe_of_a_hub_model_trains_a_local_directory(name: str, tmp_path: Path) -> None:
    """By the overrides that its head names."""
    file = ROOT / "recipes" / f"{name}.yaml"
    (line,) = re.findall(r"^# +(model\.name=DIRECTORY .*)", file.read_text(encoding="utf-8"), re.MULTILINE)
    given = [word.replace("DIRECTORY", MODEL) for word in shlex.split(line)]
    few = ["data.train.0.sample=60", "data.sequence_length=512", "length.epochs=null", "length.steps=1", "sample=null"]
    few += ["batch.global_size=2", "batch.micro_size=1", f"data.cache_dir={tmp_path / 'cache'}"]
    recipe = load_recipe(file, [*given, *few, f"output.dir={tmp_path / 'run'}"])
    run_here(recipe.model_dump(mode="json"))
    facts = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert facts["results"]["train_loss"] > 0
    assert (tmp_path / "run" / "model" / "adapter_model.safetensors").is_file() == (name != "llama_full")
    (source,) = facts["data"]["train"]["sources"]
    assert source["name"] == f"built-in sample (60 {'stories' if name == 'llama_lora' else 'conversations'})"


@pytest.mark.parametrize("file", LAUNCH_FILES, ids=lambda file: file.stem)
def test_launch_file_loads(file: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    config = load_config_from_file(str(file))  # refuses unknown keys at the top
    assert not config.use_cpu
    assert config.mixed_precision is None, "the recipe decides the precision"
    options = vars(launch_command_parser().parse_args(["script.py"]))
    for section in (config.fsdp_config, config.deepspeed_config, config.parallelism_config):
        assert set(section or {}) <= set(options), "the launcher knows no such key"
    named = (config.deepspeed_config or {}).get("deepspeed_config_file")
    assert named is None or ROOT / named in DS_CONFIGS


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("file", DS_CONFIGS, ids=lambda file: file.stem)
def test_ds_config_completes(file: Path, precision: str) -> None:
    recipe = validate_recipe({**WHOLE, "batch": {"global_size": 16, "micro_size": 4}, "optim": {"clip_norm": None}})
    config = deepspeed_config.complete_config(
        Launch(kind="zero2", num_processes=2, ds_config=json.loads(file.read_text()), ds_place=file.name),
        recipe,
        precision=precision,
        accumulation=2,
    )
    deepspeed_config.fit_to_model(config, hidden_size=64, parameter_sizes=[64 * 64, 64])
    assert '"auto"' not in json.dumps(config)
    assert config["train_batch_size"] == 16
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["gradient_accumulation_steps"] == 2
    assert config["gradient_clipping"] == 0.0
    assert config["fp16"]["enabled"] is False
    assert config["communication_data_type"] == "fp32"

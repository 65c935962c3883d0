"""What makes a run another run: a key of a recipe does, or may change at a resume. A new key needs a decision."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import until
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st
from inside import run_here
from ranks import CONFIG, MODEL, Place
from recipe_keys import keys_of
from recipes_for_tests import base
from testdata import BPE

from finetune.checkpoint import run_fingerprint
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.row_order import RowOrder
from finetune.tasks.task_lookup import find_task
from finetune.training.built_run import measure_length
from finetune.utils import atomic_files
from finetune.utils.errors import FinetuneError, RecipeError

# Keys that the mathematics depend on: another value, and what the recipe must say for the key to count at all.
LORA = {"lora": {}}
CHAT = {"source.path": "chats.jsonl", "chat.template": "plain"}
CLASSES = {"task.name": "sequence_classification", "data.packing": "padded"}
TAUGHT = {"task.name": "distill", "distillation": {"teacher": {"name": str(MODEL)}}}
PAIRS = {"task.name": "dpo", "source.path": "pairs.jsonl", "preference.beta": 0.2}
TEXTS = {"task.name": "embedding", "source.path": "texts.jsonl", "data.packing": "padded", "embedding.scale": 10.0}
SCALED = {"optim.lr_scaling": "linear", "optim.reference_batch": 8}


def roped(kind: str) -> dict[str, Any]:
    """A pretrained model whose positions are stretched."""
    return {
        "model.config": None,
        "model.name": str(MODEL),
        "model.rope_scaling": {"type": kind, "factor": 2.0},
    }


MATHEMATICS: dict[str, tuple[Any, dict[str, Any]]] = {
    "task.name": ("own_task:mlp", {}),
    "task.loss": ("own_task:smoothed", {}),
    "task.num_labels": (3, {}),
    "task.class_weights": ([1.0, 3.0], CLASSES),
    "task.label_smoothing": (0.1, {}),
    "task.args": ({"width": 8}, {}),
    "model.config": ({**CONFIG, "hidden_size": 32}, {}),
    "model.freeze": (["embed_tokens"], {}),
    "model.quantization": ("nf4", LORA),
    "model.double_quantization": (False, {**LORA, "model.quantization": "nf4"}),
    "model.fp8": ("emulated", {}),
    "model.neftune_alpha": (5.0, {}),
    "model.rope_scaling.type": ("linear", roped("yarn")),
    "model.rope_scaling.factor": (4.0, roped("yarn")),
    "model.rope_scaling.attention_factor": (0.9, roped("yarn")),
    "model.rope_scaling.beta_fast": (16.0, roped("yarn")),
    "model.rope_scaling.beta_slow": (2.0, roped("yarn")),
    "model.rope_scaling.low_freq_factor": (2.0, roped("llama3")),
    "model.rope_scaling.high_freq_factor": (3.0, roped("llama3")),
    "lora.rank": (4, LORA),
    "lora.alpha": (7.0, LORA),
    "lora.dropout": (0.5, LORA),
    "lora.targets": (["q_proj"], LORA),
    "lora.rslora": (True, LORA),
    "lora.dora": (True, LORA),
    "lora.init": ("gaussian", LORA),
    "lora.save_modules": (["lm_head"], LORA),
    "tokenizer.name": (BPE, {}),
    "tokenizer.vocab_size": (300, {"tokenizer.name": None, "tokenizer.vocab_size": 290}),
    "source.sample": (20, {"source.path": None, "source.sample": 30}),
    "source.path": ("other.jsonl", {}),
    "source.text_field": ("story", {}),
    "source.pair_field": ("story", {**CLASSES, "source.pair_field": "text"}),
    "source.format": ("pairs", CHAT),
    "source.fields": ({"user": "other", "assistant": "answer"}, CHAT),
    "source.weight": (2.0, {}),
    "source.weight_field": ("label", {}),
    "source.limit": (30, {}),
    "data.validation_fraction": (0.3, {}),
    "data.sequence_length": (64, {}),
    "data.packing": ("padded", {}),
    "data.long_documents": ("drop", {}),
    "data.remainder": ("drop", {"data.packing": "wrapped"}),
    "data.last_batch": ("drop", {"data.packing": "padded", "batch.global_size": 8}),
    "data.strip": (False, {}),
    "data.lowercase": (True, {}),
    "data.add_bos": (False, {}),
    "data.add_eos": (False, {}),
    "chat.template": ("other.jinja", CHAT),
    "chat.template_args": ({"bos_token": "x"}, CHAT),
    "chat.train_on": ("last", CHAT),
    "chat.end_token": ("add", CHAT),
    "chat.too_long": ("cut_left", CHAT),
    "chat.roles": ({"agent": "assistant"}, CHAT),
    "chat.drop_tools": (True, CHAT),
    "chat.drop_reasoning": (True, CHAT),
    "preference.loss": (["hinge"], {**PAIRS, "preference.loss": ["sigmoid"]}),
    "preference.loss_weights": ([2.0], PAIRS),
    "preference.beta": (0.3, PAIRS),
    "preference.reference.name": ("other", {**PAIRS, "preference.reference.name": "m"}),
    "preference.reference.revision": ("other", {**PAIRS, "preference.reference.name": "m"}),
    "preference.reference.quantization": ("nf4", {**PAIRS, "preference.reference.name": "m"}),
    "preference.label_smoothing": (0.1, {**PAIRS, "preference.loss": ["robust"]}),
    "preference.f_divergence": ("forward_kl", PAIRS),
    "preference.f_alpha": (0.7, {**PAIRS, "preference.f_divergence": "alpha_divergence"}),
    "preference.discopop_tau": (0.1, {**PAIRS, "preference.loss": ["discopop"]}),
    "preference.ld_alpha": (0.5, PAIRS),
    "preference.use_weighting": (True, PAIRS),
    "preference.ranking": ("all", PAIRS),
    "preference.gamma": (0.7, {**PAIRS, "task.name": "simpo"}),
    "preference.centering": (0.1, {**PAIRS, "task.name": "reward", "data.packing": "padded", "preference.beta": 0.1}),
    "preference.desirable_weight": (2.0, {**PAIRS, "task.name": "kto"}),
    "preference.undesirable_weight": (2.0, {**PAIRS, "task.name": "kto"}),
    "preference.sft_weight": (0.3, {**PAIRS, "task.name": "cpo"}),
    "embedding.pooling": ("mean", TEXTS),
    "embedding.scale": (30.0, TEXTS),
    "embedding.symmetric": (True, TEXTS),
    "distillation.teacher.name": (f"{MODEL}/.", TAUGHT),
    "distillation.teacher.revision": ("other", TAUGHT),
    "distillation.teacher.quantization": ("nf4", TAUGHT),
    "distillation.top_k": (8, TAUGHT),
    "distillation.beta": (0.5, TAUGHT),
    "distillation.temperature": (2.0, TAUGHT),
    "distillation.sft_weight": (0.5, TAUGHT),
    "batch.global_size": (2, {}),
    "optim.name": ("SGD", {}),
    "optim.lr": (1e-5, {}),
    "optim.weight_decay": (0.3, {}),
    "optim.args": ({"eps": 1e-6}, {}),
    "optim.clip_norm": (None, {}),
    "optim.lr_scaling": ("sqrt", SCALED),
    "optim.reference_batch": (16, SCALED),
    "optim.lora_plus": (8.0, {"lora.rank": 4, "optim.lora_plus": 16.0}),
    "optim.layer_decay": (0.9, {}),
    "optim.lr_factors": ({"lm_head": 2.0}, {}),
    "optim.ema_decay": (0.99, {}),
    "optim.ema_every_steps": (2, {"optim.ema_decay": 0.9}),
    "schedule.name": ("wsd", {}),
    "schedule.warmup_steps": (3, {}),
    "schedule.warmup_fraction": (0.3, {"schedule.warmup_fraction": 0.2}),
    "schedule.floor": (0.3, {}),
    "schedule.decay_fraction": (0.3, {}),
    "precision": ("bf16", {}),
    "optim.reduce_dtype": ("bf16", {}),
    "seed": (5, {}),
}

# Keys that may change: how fast, how long, how often, where.
FREE: dict[str, Any] = {
    "model.attention": "eager",
    "model.loss": "plain",
    "model.gradient_checkpointing": True,
    "model.activation_offload": True,
    "model.compile": True,
    "log.profile": 3,
    "model.trust_remote_code": True,
    "data.validation": [{"sample": 20}],
    "data.cache_dir": None,
    "data.num_workers": 2,
    "checks.max_broken": 0.1,
    "checks.max_unsupervised": 0.9,
    "checks.max_too_long": 0.9,
    "checks.max_left_out": 0.9,
    "checks.max_overlap": 0.9,
    "checks.min_supervised": 0.001,
    "checks.min_ended": 0.001,
    "checks.max_lossy": 0.9,
    "checks.max_mojibake": 0.9,
    "checks.max_nul": 0.9,
    "checks.max_duplicate_keys": 0.9,
    "batch.micro_size": 1,
    "length.steps": 77,
    "length.epochs": 3.0,
    "length.tokens": 10_000,
    "eval.every_steps": 3,
    "eval.per_epoch": 2.0,
    "eval.at_end": False,
    "eval.micro_size": 4,
    "eval.metrics": ["f1"],
    "eval.prompts": [{"sample": 2}],
    "eval.max_new_tokens": 7,
    "eval.patience": 3,
    "sample.prompt": "Once",
    "sample.every_steps": 3,
    "sample.at_end": False,
    "sample.max_new_tokens": 3,
    "sample.temperature": 0.0,
    "sample.top_k": None,
    "log.every_steps": 7,
    "log.system_every_s": None,
    "log.trackers": ["tensorboard"],
    "output.dir": "elsewhere",
    "output.overwrite": True,
    "output.save_model": False,
    "output.model": "best",
    "checkpoint.every_steps": 3,
    "checkpoint.per_epoch": 0.5,
    "checkpoint.every_minutes": 1.0,
    "checkpoint.at_end": False,
    "checkpoint.keep": 5,
    "checkpoint.keep_best_by": None,
    "checkpoint.asynchronous": False,
    "resume.mode": "must",
    "resume.allow": ["seed"],
    "guard.max_skipped_steps": 2,
    "guard.grace_s": 3.0,
    "guard.stall_s": 5.0,
    "guard.straggler": None,
    "guard.alert": "true",
    "guard.alert_on": ["failed"],
}

# Keys that are refused without others.
NEED = {
    "eval.metrics": {"eval.prompts": [{"sample": 2}]},
    "eval.prompts": {"eval.metrics": ["f1"]},
    "eval.patience": {"eval.every_steps": 3},
    "output.model": {"eval.every_steps": 3},
}

# Keys that only say where something is: they count by what they bring, which has a digest or a commit.
BY_CONTENT = {"model.name", "model.revision", "tokenizer.revision"} | {
    f"source.{key}" for key in ("hub", "hub_config", "revision", "split", "label_field")
}

SEVERAL = {"task.name": {"task.name", "data"}, "task.args": {"task.args", "task.args.width"}}
SEVERAL |= {"preference.ranking": {"preference.ranking", "data"}}
SEVERAL |= {
    "optim.args": {"optim.args", "optim.args.eps"},
    "optim.lr_factors": {"optim.lr_factors", "optim.lr_factors.lm_head"},
    "model.config": {"model.config.hidden_size"},
}


def reported(key: str) -> set[str]:
    """Under which names a difference is told."""
    return {"data"} if key.split(".")[0] in ("data", "tokenizer", "source", "chat") else SEVERAL.get(key, {key})


def test_every_key_is_decided() -> None:
    lists = [set(MATHEMATICS), set(FREE), BY_CONTENT]
    # `data.train` is its sources; that a model has adapters at all is `lora`, whose keys then appear.
    assert set.union(*lists) | {"data.train"} == keys_of(Recipe)
    assert sum(map(len, lists)) == len(set.union(*lists)), "a key is in two lists"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("identity")
    for name, count in (("train", 61), ("other", 51)):
        stories = [
            {"text": f" Story {i}. The Cat {i} sat.", "story": f"A dog {i} ran.", "label": i % 2} for i in range(count)
        ]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(story) + "\n" for story in stories))
    talks = [{"question": f"q{i}", "other": f"o{i}", "answer": f"a{i}"} for i in range(61)]
    (made / "chats.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    pairs = [{"prompt": f"q{i}", "chosen": f"a{i}", "rejected": f"b{i}"} for i in range(61)]
    (made / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    texts = [{"anchor": f"q{i}", "positive": f"a{i}"} for i in range(61)]
    (made / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (made / "other.jinja").write_text(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    return made


def facts(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """The identity of the plain recipe with some keys changed."""
    tree: dict[str, Any] = {
        "model": {"config": CONFIG},
        "tokenizer": {"name": str(MODEL)},
        "data": {"validation_fraction": 0.0, "sequence_length": 32, "num_workers": 1},
        "batch": {"global_size": 4, "micro_size": 2},
        "length": {"steps": 10},
        "precision": "fp32",
    }
    tree["data"]["cache_dir"] = str(folder / "cache")
    source: dict[str, Any] = {"path": "train.jsonl"}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if section == "source":
            source[name] = value
        elif key == "chat.template" and value != "plain":
            tree["chat"] = {**(tree.get("chat") or {}), "template": str(folder / value)}
        elif section == "length":
            tree["length"] = {name: value}
        elif key == "data.cache_dir":
            tree["data"]["cache_dir"] = str(folder / "another")
        elif "." in name:
            inner, _, last = name.partition(".")
            tree[section] = {**tree[section], inner: {**tree[section].get(inner, {}), last: value}}
        elif name:
            tree[section] = {**(tree.get(section) or {}), name: value}
        else:
            tree[section] = value
    if source["path"] is not None:
        source["path"] = str(folder / source["path"])
    tree["data"]["train"] = [source]
    recipe = validate_recipe(tree)
    ready = find_task(recipe).build_data(recipe, True)
    num_rows, size = len(ready.train), recipe.batch.global_size
    length = measure_length(recipe.length, size, recipe.data, num_rows)
    order = RowOrder(recipe.seed, num_rows, length.epoch_rows, size, ready.digest)
    return json.loads(json.dumps(run_fingerprint.identity_of(recipe, order, run_fingerprint.base_of(recipe))))


def check(folder: Path, mathematical: list[str], free: list[str]) -> None:
    base: dict[str, Any] = {}
    for key in mathematical:
        base |= MATHEMATICS[key][1]
    # A share is held out only where no validation source is given.
    if "data.validation_fraction" in mathematical and "data.validation" in free:
        reject()
    changes = {name: value for key in free for name, value in NEED.get(key, {}).items()}
    changes |= {key: MATHEMATICS[key][0] for key in mathematical} | {key: FREE[key] for key in free}
    # Another key may need the very value that this one changes to.
    mathematical = [key for key in mathematical if key not in base or base[key] != changes[key]]
    try:
        saved, now = facts(folder, base), facts(folder, {**base, **changes})
    except FinetuneError:
        if len(mathematical) + len(free) > 1:
            reject()  # some exclude each other, or leave no rows
        raise
    expected = sorted(set().union(*map(reported, mathematical)))
    if not expected:
        assert run_fingerprint.compare_identities(saved, now, (), place="runs/run") == []
        return
    with pytest.raises(RecipeError) as caught:
        run_fingerprint.compare_identities(saved, now, (), place="runs/run")
    said = str(caught.value)
    assert said.startswith("runs/run holds a run whose mathematics differ from this recipe's: ")
    assert f"resume.allow=[{', '.join(expected)}]" in said
    for key in expected:
        assert f"{key}: " in said
    # What is named may differ, and nothing else.
    assert run_fingerprint.compare_identities(saved, now, expected, place="") == expected
    sections = {key.split(".")[0] for key in expected}
    assert run_fingerprint.compare_identities(saved, now, sections, place="") == expected
    for key in expected:
        others = [other for other in expected if other != key and not key.startswith(other + ".")]
        with pytest.raises(RecipeError, match=rf"resume\.allow=\[.*{key}\]"):
            run_fingerprint.compare_identities(saved, now, others, place="")


@pytest.mark.parametrize("key", [*MATHEMATICS, *FREE])
def test_a_key_alone(folder: Path, key: str) -> None:
    check(folder, *(([key], []) if key in MATHEMATICS else ([], [key])))


@settings(max_examples=40)
@example(mathematical=["model.quantization", "model.double_quantization"], free=[])
@given(
    mathematical=st.lists(st.sampled_from(sorted(MATHEMATICS)), max_size=3, unique=True),
    free=st.lists(st.sampled_from(sorted(FREE)), max_size=8, unique=True),
)
def test_several_at_once(folder: Path, mathematical: list[str], free: list[str]) -> None:
    check(folder, mathematical, free)


def test_adapters_or_none(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"resume\.allow=\[lora\.alpha, lora\.dora, .*lora\.targets\]"):
        run_fingerprint.compare_identities(facts(folder, {}), facts(folder, LORA), (), place="")


def test_a_model_is_what_is_in_it(folder: Path, tmp_path: Path) -> None:
    """Elsewhere it is the same; with one other number it is another."""
    first, second = (shutil.copytree(MODEL, tmp_path / name) for name in ("here", "there"))
    here, there = (facts(folder, {"model.config": None, "model.name": str(path)}) for path in (first, second))
    assert run_fingerprint.compare_identities(here, there, (), place="") == []
    config = json.loads((second / "config.json").read_text())
    (second / "config.json").write_text(json.dumps({**config, "rope_theta": 7.0}))
    changed = facts(folder, {"model.config": None, "model.name": str(second)})
    with pytest.raises(RecipeError, match=r"model\.name: other content\. .*resume\.allow=\[model\.name\]"):
        run_fingerprint.compare_identities(here, changed, (), place="")


@pytest.mark.parametrize(("name", "close"), [("optim.lrr", "optim.lr"), ("data.train", "data"), ("logs", None)])
def test_what_cannot_differ_cannot_be_allowed(folder: Path, name: str, close: str | None) -> None:
    one = facts(folder, {})
    with pytest.raises(RecipeError, match=rf"resume\.allow: '{name}' is nothing that can differ") as caught:
        run_fingerprint.compare_identities(one, one, [name], place="")
    assert close is None or f"did you mean '{close}'?" in str(caught.value)


# ---------------------------------------------------------------- the base's digest


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files whose content is read for a digest."""
    names: list[str] = []
    digest = atomic_files.file_digest
    monkeypatch.setattr(run_fingerprint, "file_digest", lambda file: (names.append(file.name), digest(file))[1])
    return names


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"first")
    return file


def later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if files had been left alone for a while."""
    monkeypatch.setattr(run_fingerprint, "_SETTLED_NS", -1)


def test_a_digest_is_remembered(weights: Path, tmp_path: Path, read: list[str], monkeypatch: Any) -> None:
    later(monkeypatch)
    found = [run_fingerprint._digest(weights, tmp_path / "cache") for _ in range(3)]
    assert found == [atomic_files.file_digest(weights)] * 3
    assert read == ["model.safetensors"]


def rewritten(file: Path) -> None:
    """In place, with its size and its times."""
    facts = file.stat()
    file.write_bytes(b"other")
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def replaced(file: Path) -> None:
    """By another file with its size and its times."""
    facts = file.stat()
    other = file.with_name("other")
    other.write_bytes(b"other")
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    other.rename(file)


def linked(file: Path) -> None:
    other = file.with_name("other")
    file.rename(file.with_name("before"))
    other.write_bytes(b"other")
    file.symlink_to(other)


@pytest.mark.parametrize("change", [rewritten, replaced, linked, lambda file: file.write_bytes(b"longer than that")])
def test_whatever_changes_a_file_changes_its_digest(
    change: Callable[[Path], Any], weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch)
    before = run_fingerprint._digest(weights, tmp_path / "cache")
    tick = weights.stat().st_ctime_ns
    until(lambda: clock(tmp_path) > tick, 10, "the file system's clock stands still")
    change(weights)
    assert run_fingerprint._digest(weights, tmp_path / "cache") == atomic_files.file_digest(weights) != before


def clock(folder: Path) -> int:
    """The time that a file system gives to a change now."""
    (folder / "clock").touch()
    return (folder / "clock").stat().st_ctime_ns


def test_one_that_was_just_written_is_not_remembered(
    weights: Path, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second change within one tick of the clock would not show."""
    assert run_fingerprint._SETTLED_NS > 10**9
    monkeypatch.setattr(run_fingerprint, "_SETTLED_NS", 10**18)  # however long this test takes
    for _ in range(2):
        run_fingerprint._digest(weights, tmp_path / "cache")
    assert len(read) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("text", ["", "[]", "null", '{"facts": 1}', "\xff"])
def test_what_is_damaged_in_the_cache_is_read_again(
    text: str, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch)
    run_fingerprint._digest(weights, tmp_path / "cache")
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_bytes(text.encode("latin-1"))
    assert run_fingerprint._digest(weights, tmp_path / "cache") == atomic_files.file_digest(weights)
    (tmp_path / "file").touch()
    assert run_fingerprint._digest(weights, tmp_path / "file" / "cache") == atomic_files.file_digest(weights)


def test_a_hub_model_is_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its name: what lies behind a revision such as `main` may change."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    recipe = validate_recipe(base(model={"name": "someone/model", "config": None}))
    cached = tmp_path / "models--someone--model"
    found = []
    for commit in ("a" * 40, "b" * 40):
        for path, text in ((f"snapshots/{commit}/config.json", "{}"), ("refs/main", commit)):
            (cached / path).parent.mkdir(parents=True, exist_ok=True)
            (cached / path).write_text(text)
        found.append(run_fingerprint.base_of(recipe))
        # Machines compare the content of their caches, too.
        assert list(run_fingerprint.base_files(recipe)) == ["config.json"]
    assert [one["digest"] for one in found if one] == ["a" * 40, "b" * 40]


def test_one_rank_reads_the_base_once(place: Place, monkeypatch: pytest.MonkeyPatch, read: list[str]) -> None:
    """Over all starts, until it changes; the other ranks hear of it."""
    recipe = place.recipe(model={"name": str(MODEL), "config": None}, length={"steps": 1})
    env = {"DIGESTED": str(place.folder / "digested")}
    with place.fork_server.start(
        "ddp", place.folder / "ranks", recipe, script="tests/support/digest_worker.py", env=env
    ) as ranks:
        assert ranks.wait() == [0, 0], ranks.output()
    assert sorted((place.folder / "digested").read_text().splitlines()) == ["0 config.json", "0 model.safetensors"]
    assert "Nothing is left to do" in run_here(yaml.safe_load(recipe.read_text())).said
    assert read == []


def test_all_ranks_hear_that_the_base_cannot_be_read(place: Place, tmp_path: Path) -> None:
    model = shutil.copytree(MODEL, tmp_path / "model")
    (model / "extra.safetensors").mkdir()  # not opened as weights, but part of what the digest says
    recipe = place.recipe(model={"name": str(model), "config": None})
    with place.fork_server.start("ddp", place.folder / "ranks", recipe) as ranks:
        assert ranks.wait() == [2, 2], ranks.output()
    assert ranks.output().count(f"model.name: {model} cannot be read: Is a directory.") == 1

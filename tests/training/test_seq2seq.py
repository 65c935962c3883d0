"""Sequence to sequence: transformers' own loss and texts, every backend, and what is written and predicted."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import opened_here
from filelock import FileLock
from harness import Launcher, assert_same_path
from inside import run_here, stop_after
from recipes_for_tests import LLAMA, MODEL, SGD, base
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer, MBartTokenizer

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.synthetic import story_generator
from finetune.export import verify_export
from finetune.tasks.task import TaskData
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.utils.errors import DataError, RecipeError

T5 = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "model_type": "bart",
    "d_model": 32,
    **dict.fromkeys(("dropout", "attention_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0),
    **{f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 2), ("ffn_dim", 64))},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
}
NETWORKS = {"t5": T5, **{name: {**BART, "model_type": name} for name in ("bart", "mbart", "pegasus", "m2m_100")}}

# Names of a story, to be written in capitals: short, and soon learned.
_STORIES = [story.text.split() for story in story_generator.stories(80)]
PAIRS = [(" ".join(words[: 4 + n % 9]), words[n % 4].upper()) for n, words in enumerate(_STORIES)]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)


def save(file: Path, pairs: Any = None) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as table:
        csv.writer(table).writerows([("words", "loud"), *(PAIRS if pairs is None else pairs)])
    return str(file)


def save_network(folder: Path, config: dict[str, Any]) -> str:
    """A pretrained network, as transformers writes it, with the tokenizer of the tests."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.eos_token_id}
    ends |= {"decoder_start_token_id": tokenizer.eos_token_id, "forced_eos_token_id": None}
    kind = {key: value for key, value in config.items() if key != "model_type"}
    torch.manual_seed(1)
    made = AutoConfig.for_model(config["model_type"], **kind, **ends, vocab_size=512, max_position_embeddings=64)
    AutoModelForSeq2SeqLM.from_config(made).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def part_head(folder: str) -> str:
    """Makes a T5 one like Flan-T5: its head is no longer the embedding, though T5's class ties them."""
    file, config = Path(folder, "model.safetensors"), Path(folder, "config.json")
    tensors = load_file(file)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = torch.randn(tensors["shared.weight"].shape, generator=torch.Generator().manual_seed(2))
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    return folder


def job(file: str, **sections: Any) -> dict[str, Any]:
    tree = base(
        task={"name": "seq2seq_lm"},
        model={"config": T5},
        data={
            "train": [{"path": file, "text_field": "words", "pair_field": "loud"}],
            "validation": [],
            "validation_fraction": 0.25,
            "packing": "padded",
            "sequence_length": 32,
        },
        length={"steps": 4},
    )
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if values is not None else None
    return tree


def data_of(tmp_path: Path, pairs: Any = None, **sections: Any) -> TaskData:
    keys = {"validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **sections.pop("data", {})}
    recipe = validate_recipe(job(save(tmp_path / "pairs.csv", pairs), data=keys, **sections), None, BUILT_IN)
    return find_task(recipe).build_data(recipe, True)


def prompts_of(file: Path, count: int = 5) -> list[dict[str, Any]]:
    lines = [json.dumps({"prompt": source, "reference": target}) for source, target in PAIRS[:count]]
    file.write_text("\n".join(lines))
    return [{"path": str(file)}]


@pytest.mark.parametrize("name", NETWORKS)
def test_loss_and_gradients_are_those_of_labels(tmp_path: Path, name: str) -> None:
    keys = {"validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache")}
    recipe = validate_recipe(job(save(tmp_path / "pairs.csv"), model={"config": NETWORKS[name]}, data=keys))
    task = find_task(recipe)
    data = task.build_data(recipe, True)
    network: Any = task.build_model(recipe, data)
    rows = np.arange(5)
    batch, targets = data.train.batch(rows), data.train.num_targets(rows)
    assert targets == int((batch["targets"] != -100).sum())
    loss = task.loss_sum(network, batch)
    loss.backward()
    mine = {name: p.grad.clone() / targets for name, p in network.named_parameters() if p.grad is not None}
    network.zero_grad()
    asked = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    theirs = network(**asked, labels=batch["targets"])
    theirs.loss.backward()
    assert loss.item() / targets == pytest.approx(theirs.loss.item(), rel=1e-6)
    for key, parameter in network.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(mine[key], parameter.grad, rtol=1e-4, atol=1e-6)
    assert task.evaluation is not None
    counted, values = task.evaluation.compute(network, batch)
    hits = int((theirs.logits.argmax(-1) == batch["targets"]).sum())
    assert values is None
    assert counted.tolist() == pytest.approx([loss.item(), hits], rel=1e-5)
    # However a batch is split.
    alone = sum(task.loss_sum(network, data.train.batch(rows[n : n + 1])).item() for n in range(5))
    assert alone == pytest.approx(loss.item(), rel=1e-5)


BACKENDS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("ddp", "fsdp", "zero3")]


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    place = launcher.shared / "seq2seq"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            save(place / "pairs.csv")
            prompts_of(place / "prompts.jsonl", 3)
            save_network(place / "bart", BART)
            part_head(save_network(place / "flan", T5))
    file = str(place / "pairs.csv")
    texts = {
        "metrics": ["f1"],
        "prompts": [{"path": str(place / "prompts.jsonl")}],
        "max_new_tokens": 8,
        "micro_size": 3,
    }
    sample = {"prompt": PAIRS[0][0], "max_new_tokens": 4, "temperature": 0.0}
    starts = [
        {"model": {"name": str(place / n), "config": None}, "tokenizer": {"name": None}} for n in ("bart", "flan")
    ]
    jobs = {
        "targets": job(file, optim={**SGD, "lr": 0.1, "args": {}}, eval=texts, sample=sample),
        "lora": job(file, **starts[0], lora={"rank": 4}, optim={"lr": 0.01}),
        "flan": job(file, **starts[1], optim={"lr": 0.01}, eval=texts, sample=sample),
    }
    return dict.fromkeys(("single", "ddp", "fsdp", "zero3"), jobs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_the_single_process_path(launcher: Launcher, backend: str) -> None:
    """Losses, figures of evaluations, samples, and texts written for prompts, of which ranks have unlike numbers."""
    jobs = LAUNCHED_RUNS(launcher)[backend]
    for name in jobs:
        single, other = launcher.many("single", jobs)[name], launcher.many(backend, jobs)[name]
        assert_same_path(single, other, 1e-4)
        for figure in ("loss", "perplexity", "accuracy", *(["f1"] if name != "lora" else [])):
            one, two = (run.validation(f"validation_{figure}") for run in (single, other))
            assert one == pytest.approx(two, rel=1e-3, abs=1e-6)
        if name != "lora":
            assert single.facts["results"]["sample"] == other.facts["results"]["sample"]
            written = [(run.directory / "predictions.jsonl").read_text() for run in (single, other)]
            assert written[0] == written[1]


@pytest.mark.parametrize("shape", ["bart", "lora", "flan"])
def test_targets_to_the_end(tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Learned, evaluated, exported, opened by transformers alone, and written by every place."""
    file = save(tmp_path / "pairs.csv")
    more: dict[str, Any] = {
        "optim": {"lr": 1e-2},
        "length": {"steps": 30},
        "output": {"dir": str(tmp_path / "run")},
        "eval": {"metrics": ["exact_match"], "prompts": prompts_of(tmp_path / "prompts.jsonl"), "max_new_tokens": 8},
        "sample": {"prompt": PAIRS[0][0], "max_new_tokens": 8, "temperature": 0.0},
        "checkpoint": {"keep_best_by": "validation_accuracy"},
    }
    if shape in ("lora", "flan"):
        folder = save_network(tmp_path / "start", BART if shape == "lora" else T5)
        start = {"name": folder if shape == "lora" else part_head(folder), "config": None}
        more |= {"model": start, "tokenizer": {"name": None}, "lora": {"rank": 4} if shape == "lora" else None}
    else:
        more["model"] = {"config": NETWORKS[shape]}
    tree = job(file, **more)
    tree["data"] |= {"validation": tree["data"]["train"], "validation_fraction": 0.01, "cache_dir": str(tmp_path / "c")}
    run = run_here(tree)
    # Adapters of a network that knows nothing yet learn little.
    assert run.losses[-1] < (0.97 if shape == "lora" else 0.8) * run.losses[0]
    assert main.main(["data", str(run.directory / "recipe.yaml"), "--show", "1"]) == 0
    learned = re.findall(r"\[(.*?)\]", capsys.readouterr().out.split("learned")[-1])
    assert "".join(learned) == f"<s>{PAIRS[0][1]}</s>"
    assert main.main(["eval", str(run.directory), "--data", file, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("loss", "perplexity", "accuracy", "targets"):
        assert figures[name] == pytest.approx(run.results[f"validation_{name}"], rel=1e-4)
    words = ["--max-new-tokens", "8"]
    assert main.main(["predict", str(run.directory), file, *words]) == 0
    found = [json.loads(line)["prediction"] for line in capsys.readouterr().out.splitlines()]
    assert len(found) == len(PAIRS)
    written = [json.loads(line) for line in (run.directory / "predictions.jsonl").read_text().splitlines()]
    # BART's own generation may end a text that the loop cuts.
    assert [line["prediction"][: len(text)] for line, text in zip(written, found, strict=False)] == found[:5]
    assert run.results["sample"].startswith(found[0])
    for place in ["adapter", "merged"] if shape == "lora" else ["merged"]:
        assert main.main(["export", str(run.directory), "--as", place]) == 0
        capsys.readouterr()
        target = tmp_path / f"{place}.csv"
        exported = str(run.directory / "exports" / place)
        assert main.main(["predict", exported, file, "--text-field", "words", "--output", str(target), *words]) == 0
        with target.open(newline="") as table:
            assert [row["prediction"] for row in csv.DictReader(table)] == found
    network = AutoModelForSeq2SeqLM.from_pretrained(run.directory / "exports" / "merged").eval()
    tokenizer = AutoTokenizer.from_pretrained(run.directory / "exports" / "merged")
    assert type(network).__name__ == f"{'T5' if shape == 'flan' else 'Bart'}ForConditionalGeneration"
    loss = 0.0
    for (source, target_text), text in zip(PAIRS, found, strict=True):
        ids = {"input_ids": tokenizer(source, return_tensors="pt")["input_ids"]}
        wanted = tokenizer(text_target=target_text)["input_ids"]
        wanted += [tokenizer.eos_token_id] * (wanted[-1] != tokenizer.eos_token_id)
        with torch.no_grad():
            loss += network(**ids, labels=torch.tensor([wanted])).loss.item() * len(wanted)
            told = network.generate(**ids, max_new_tokens=8)[0]
        assert tokenizer.decode(told, skip_special_tokens=True).strip() == text
    assert loss / figures["targets"] == pytest.approx(figures["loss"], rel=1e-4)
    assert main.main(["generate", str(run.directory), "--prompt", PAIRS[0][0], *words]) == 0
    assert capsys.readouterr().out.strip() == found[0]
    assert main.main(["chat", str(run.directory)]) == 2
    assert "it writes one text from another. `finetune generate` and" in capsys.readouterr().err


def test_a_stopped_run_goes_on(tmp_path: Path) -> None:
    file = save(tmp_path / "pairs.csv")
    whole, parts = (job(file, output={"dir": str(tmp_path / name)}) for name in ("whole", "parts"))
    run_here(parts, stop_after(2))
    done = run_here(whole), run_here(parts)
    assert done[0].losses == done[1].losses
    assert done[0].results["validation_loss"] == done[1].results["validation_loss"]


def test_what_is_too_long_is_cut_or_left_out_and_counted(tmp_path: Path) -> None:
    pairs = [("one two", "ONE"), ("many " * 60, "SHORT"), ("short", "MANY " * 60)]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    cut = data_of(tmp_path, pairs)
    assert [cut.report["train"][key] for key in ("rows", "over_long", "truncated", "dropped")] == [3, 2, 2, 0]
    batch = cut.train.batch(np.arange(3))
    assert batch["input_ids"].shape == batch["targets"].shape == (3, 32)
    assert batch["targets"][:, 0].tolist() == [tokenizer(target)["input_ids"][0] for _, target in pairs]
    # A target has its end, wherever it was cut.
    ends = [int(row[row != -100][-1]) for row in batch["targets"]]
    assert ends == [tokenizer.eos_token_id] * 3
    assert cut.train.num_targets(np.arange(3)) == int((batch["targets"] != -100).sum())
    assert cut.train.num_computed(np.arange(3)) == int(batch["attention_mask"].sum() + (batch["targets"] != -100).sum())
    dropped = data_of(tmp_path, pairs, data={"long_documents": "drop"}, checks={"max_left_out": 1.0})
    assert [dropped.report["train"][key] for key in ("rows", "over_long", "truncated", "dropped")] == [1, 2, 0, 2]
    assert dropped.train.batch(np.arange(1))["targets"][0, 0] == batch["targets"][0, 0]


def test_a_tokenizer_may_treat_targets_otherwise(tmp_path: Path) -> None:
    """mBART's puts the code of the source's language behind it, and that of the target's behind the target."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,'"]
    languages = {"src_lang": "en_XX", "tgt_lang": "ro_RO"}
    tokenizer = MBartTokenizer(vocab=[(piece, -float(n > 3)) for n, piece in enumerate(pieces)], **languages)
    tokenizer.save_pretrained(tmp_path / "mbart")
    data = data_of(tmp_path, tokenizer={"name": str(tmp_path / "mbart")}, data={"sequence_length": 128})
    batch = data.train.batch(np.arange(1))
    wanted = tokenizer(PAIRS[0][0], text_target=PAIRS[0][1])
    assert batch["input_ids"][batch["attention_mask"] == 1].tolist() == wanted["input_ids"]
    assert batch["targets"][batch["targets"] != -100].tolist() == wanted["labels"]
    assert tokenizer.convert_ids_to_tokens(wanted["labels"][-1]) == "ro_RO"


def test_an_empty_target_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs\.csv, line 3: the field 'loud' is empty, and both source and target"):
        data_of(tmp_path, [("one", "ONE"), ("two", " ")])
    with pytest.raises(
        DataError, match=r"pairs\.csv, line 2: the field 'words' is empty.*name another field as `text_"
    ):
        data_of(tmp_path, [("", "ONE")])


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    tree = job(save(tmp_path / "pairs.csv"))
    tree["data"]["train"][0]["pair_field"] = "quiet"
    recipe = validate_recipe(tree, None, BUILT_IN)
    with pytest.raises(DataError, match=r"no field 'quiet'; the fields are words, loud.*as the source's `pair_field`"):
        find_task(recipe).build_data(recipe, True)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(DataError, match="has no end-of-text token, so that no target would end"):
        data_of(tmp_path, tokenizer={"name": str(tmp_path / "endless")})


def test_models_of_the_other_kind_are_refused_with_the_task_to_take(tmp_path: Path) -> None:
    recipe = validate_recipe(job("x.csv", model={"config": LLAMA}), None, BUILT_IN)
    with pytest.raises(RecipeError, match=r"llama is no encoder-decoder model; task `seq2seq_lm`.*leave `task` out"):
        find_task(recipe).build_config(recipe, None)
    recipe = validate_recipe(base(model={"config": T5}), None, BUILT_IN)
    with pytest.raises(RecipeError, match=r"t5 is an encoder-decoder model.*Set task.name to `seq2seq_lm`"):
        find_task(recipe).build_config(recipe, None)


def test_files_without_the_head_are_not_whole(tmp_path: Path) -> None:
    """No head of an encoder-decoder is new, as that of a classifier may be."""
    folder = save_network(tmp_path / "start", {**BART, "tie_word_embeddings": False})
    file = tmp_path / "start" / "model.safetensors"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    recipe = validate_recipe(job("x.csv", model={"name": folder, "config": None}, tokenizer={"name": None}))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with pytest.raises(RecipeError, match=r"lacks 1 of the network's tensors: lm_head\.weight"):
        find_task(recipe).build_model(recipe, TaskData(train=None, tokenizer=tokenizer))


@pytest.mark.parametrize("skeleton", [False, True])
def test_a_head_apart_from_the_embedding_stays_so(tmp_path: Path, skeleton: bool) -> None:
    folder = part_head(save_network(tmp_path / "start", T5))
    recipe = validate_recipe(job("x.csv", model={"name": folder, "config": None}, tokenizer={"name": None}))
    task, ready = find_task(recipe), TaskData(train=None, tokenizer=AutoTokenizer.from_pretrained(MODEL))
    network: Any = (task.build_skeleton if skeleton else task.build_model)(recipe, ready)
    network.tie_weights()
    assert network.lm_head.weight is not network.shared.weight
    assert network.encoder.embed_tokens.weight is network.decoder.embed_tokens.weight is network.shared.weight
    if not skeleton:
        assert torch.equal(network.lm_head.weight, load_file(Path(folder, "model.safetensors"))["lm_head.weight"])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"data": {"packing": "documents"}}, "data.packing: seq2seq_lm reads one pair a row; set `padded`"),
        ({"data": {"train": [{"path": "x.csv"}]}}, "data: seq2seq_lm learns to write a text; name its column in each"),
        ({"chat": {}}, "chat: seq2seq_lm reads pairs of texts, and no conversations"),
        ({"task": {"class_weights": "balanced"}}, "task.class_weights: seq2seq_lm has no classes"),
        ({"eval": {"metrics": ["f1"]}}, "eval.metrics: they are computed of texts that are generated for prompts"),
        ({"checkpoint": {"keep_best_by": "validation_recall"}}, "no evaluation has 'validation_recall'"),
    ],
)
def test_what_contradicts_is_said(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(said)):
        validate_recipe(job("x.jsonl", **sections), None, BUILT_IN)

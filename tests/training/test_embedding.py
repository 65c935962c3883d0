"""Embeddings: the loss of a plain loop over the global batch, however it is split; files of sentence-transformers."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Launcher, assert_same_path
from inside import run_here
from recipes_for_tests import ARCHITECTURES, base
from test_pairs_and_weights import WORDS, save_tokenizer
from torch.nn.functional import cross_entropy, normalize
from transformers import AutoModel, AutoTokenizer

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.rows.kinds.embedded_texts import EmbeddingForm
from finetune.data.sources.conversation_formats import Tolerance
from finetune.models.forward_wrapper import unwrap
from finetune.tasks.embedding import pool
from finetune.tasks.task_lookup import BUILT_IN, named_task
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import DataError, RecipeError

ENCODER = {**ARCHITECTURES["bert"]["model"]["config"], "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def job(micro_size: int = 4, **sections: Any) -> dict[str, Any]:
    """Four steps of eight halves of built-in stories, of a decoder."""
    tree = base(
        task={"name": "embedding"},
        batch={"global_size": 8, "micro_size": micro_size},
        length={"steps": 4},
        optim={"name": "AdamW", "lr": 2e-3, "weight_decay": 0.1, "clip_norm": None, "args": {"eps": 1e-6}},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"every_steps": 4, "micro_size": 3},
    )
    data = {"train": [{"sample": 40}], "validation": [{"sample": 13}], "sequence_length": 64, "packing": "padded"}
    return {**tree, "data": data, **sections}


def texts(folder: Path, count: int = 24, *, negative: bool = True) -> list[dict[str, str]]:
    """Writes records of words, of many lengths and some longer than a row, to `texts.jsonl`."""
    random = np.random.default_rng(5)
    names = ("anchor", "positive", "negative")[: 2 + negative]
    records = [{name: " ".join(random.choice(WORDS, random.integers(1, 20))) for name in names} for _ in range(count)]
    folder.mkdir(exist_ok=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def of_encoder(folder: Path, **sections: Any) -> dict[str, Any]:
    """A run of a BERT on these records."""
    source = {"path": str(folder / "texts.jsonl")}
    data = {**job()["data"], "train": [source], "validation": [source], "cache_dir": str(folder / "cache")}
    return {
        **job(2),
        "model": {"config": ENCODER},
        "tokenizer": {"name": str(save_tokenizer(folder / "tokenizer"))},
        "data": {**data, "sequence_length": 16},
        "output": {"dir": str(folder / "run")},
        **sections,
    }


def embed(network: Any, tokenizer: Any, lines: list[str], length: int, pooling: str) -> torch.Tensor:
    """As sentence-transformers does it: a padded batch of the tokenizer, and the mask."""
    batch = tokenizer(lines, padding=True, truncation=True, max_length=length, return_tensors="pt")
    hidden, mask = network(**batch).last_hidden_state, batch["attention_mask"].float()
    if pooling == "mean":
        pooled = torch.stack([h[m == 1].mean(0) for h, m in zip(hidden, mask, strict=True)])
    else:
        places = [0 if pooling == "cls" else int(m.nonzero()[-1]) for m in mask]
        pooled = torch.stack([h[place] for h, place in zip(hidden, places, strict=True)])
    return normalize(pooled, dim=1)


@pytest.mark.parametrize(("pooling", "negative", "symmetric"), [("mean", True, True), ("cls", False, False)])
def test_the_path_is_that_of_a_plain_loop(pooling: str, negative: bool, symmetric: bool, tmp_path: Path) -> None:
    """Of torch alone, with whole similarities of the global batch in one pass; ten steps in micro-batches of two."""
    records, plain = texts(tmp_path, negative=negative), list[float]()
    given = {"scale": 10.0, "symmetric": symmetric} | ({} if pooling == "mean" else {"pooling": pooling})

    def meddle(run: BuiltRun) -> None:
        network: Any = copy.deepcopy(unwrap(run.model)).train()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        # Weight decay would shrink it, or a backend refuse it.
        assert {name for name, p in network.named_parameters() if not p.requires_grad} == {
            "pooler.dense.weight",
            "pooler.dense.bias",
        }
        optimizer = torch.optim.AdamW(trained, lr=2e-3, weight_decay=0.0, eps=1e-6)
        for step in range(10):
            rows = np.concatenate(run.feed.micro_batches(step)).tolist()  # type: ignore[attr-defined]
            a, p, *n = (
                embed(network, tokenizer, [records[row][name] for row in rows], 16, pooling) for name in records[0]
            )
            targets = torch.arange(len(rows))
            loss = cross_entropy(10.0 * a @ torch.cat([p, *n]).T, targets)
            if symmetric:
                loss = (loss + cross_entropy(10.0 * p @ a.T, targets)) / 2
            plain.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    optim = {**job()["optim"], "weight_decay": 0.0}
    done = run_here(of_encoder(tmp_path, embedding=given, length={"steps": 10}, optim=optim), meddle)
    np.testing.assert_allclose(done.losses, plain, rtol=1e-5)
    assert done.losses[-1] < done.losses[0]


ALL = {
    "embedding": job(),
    "embedding_symmetric": job(2, embedding={"symmetric": True, "pooling": "mean"}, lora={"rank": 4}),
}
LAUNCHED_RUNS = {
    "single": {**ALL, "embedding_of_1": job(1), "embedding_of_8": job(8)},
    **dict.fromkeys(("ddp", "fsdp", "zero3"), ALL),
}
FIGURES = ("accuracy", "recall_at_5")


@pytest.mark.parametrize(
    ("config", "name", "as_one"),
    [
        *(
            pytest.param("single", f"embedding_of_{size}", "embedding", marks=pytest.mark.xdist_group("single"))
            for size in (1, 8)
        ),
        *(
            pytest.param(config, name, name, marks=pytest.mark.xdist_group(config))
            for config in ("ddp", "fsdp", "zero3")
            for name in ALL
        ),
    ],
)
def test_embeddings_take_the_single_process_path(launcher: Launcher, config: str, name: str, as_one: str) -> None:
    single, other = (
        launcher.many(kind, LAUNCHED_RUNS[kind])[run].check() for kind, run in (("single", as_one), (config, name))
    )
    assert_same_path(single, other, 2e-5)
    for wanted, line in zip(single.metrics, other.metrics, strict=True):
        for figure in (key for key in wanted if key.removeprefix("validation_") in FIGURES):
            assert line[figure] == pytest.approx(wanted[figure], rel=1e-6), figure
    assert {*FIGURES} <= single.steps[0].keys()


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_poolings_look_at_no_padding(pooling: str) -> None:
    hidden, mask = torch.randn(3, 7, 4), torch.tensor([[1] * 7, [1] * 3 + [0] * 4, [1] + [0] * 6])
    for row, size in enumerate((7, 3, 1)):
        alone = hidden[row, :size]
        wanted = {"mean": alone.mean(0), "cls": alone[0], "last": alone[-1]}[pooling]
        torch.testing.assert_close(pool(hidden, mask, pooling)[row], wanted)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[str], np.ndarray]:
    """A run of an encoder with a checkpoint, some texts, and their embeddings by transformers."""
    folder = tmp_path_factory.mktemp("trained")
    records = texts(folder)
    tree = of_encoder(folder, checkpoint={"every_steps": 4})
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": record}) + "\n" for record in records))
    source = {**tree["data"]["train"][0], "fields": {name: f"text.{name}" for name in records[0]}}
    run = run_here({**tree, "data": {**tree["data"], "train": [source], "validation": [source]}})
    lines = [text for record in records for text in record.values()]
    network, tokenizer = (kind.from_pretrained(run.directory / "model") for kind in (AutoModel, AutoTokenizer))
    with torch.no_grad():
        wanted = embed(network.eval(), tokenizer, lines, 16, "mean").numpy()
    return run, lines, wanted


def test_figures_are_those_of_the_written_model(trained: tuple[Any, list[str], np.ndarray]) -> None:
    run, _, wanted = trained
    ranks = []
    for first in range(0, 24, 8):  # windows of the global batch
        a, p, n = wanted.reshape(24, 3, -1)[first : first + 8].transpose(1, 0, 2)
        scores = a @ np.concatenate([p, n]).T
        ranks += [*(scores > scores.diagonal()[:, None]).sum(1)]
    assert run.results["validation_accuracy"] == pytest.approx(np.mean(np.array(ranks) == 0))
    assert run.results["validation_recall_at_5"] == pytest.approx(np.mean(np.array(ranks) < 5))


def test_predict_writes_embeddings(
    trained: tuple[Any, list[str], np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, lines, wanted = trained
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    assert main.main(["predict", str(run.directory), str(tmp_path / "texts.jsonl")]) == 0
    given = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["text"] for record in given] == lines
    np.testing.assert_allclose([record["embedding"] for record in given], wanted, atol=2e-6)
    assert main.main(["eval", str(run.directory), "--data", str(run.directory.parent / "texts.jsonl"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["accuracy"] == pytest.approx(run.results["validation_accuracy"])
    assert figures["loss"] == pytest.approx(run.results["validation_loss"], rel=1e-5)
    assert main.main(["eval", str(run.directory), "--data", str(run.directory.parent / "texts.jsonl")]) == 0
    assert f"accuracy {figures['accuracy']:.4f}, recall_at_5" in capsys.readouterr().out
    assert main.main(["data", str(run.directory / "recipe.yaml"), "--show", "3"]) == 0
    shown = capsys.readouterr().out
    assert all(f"text [{name}]" in shown for name in ("anchor", "positive", "negative"))


def test_files_are_those_of_sentence_transformers(trained: tuple[Any, list[str], np.ndarray]) -> None:
    """Of the final model, of a checkpoint and of an export."""
    run, *_ = trained
    assert main.main(["export", str(run.directory), "--as", "merged"]) == 0
    export, checkpoint = run.directory / "exports" / "merged", run.directory / "checkpoints" / "step-00000004" / "model"
    for folder in (run.directory / "model", checkpoint, export):
        modules = json.loads((folder / "modules.json").read_text())
        assert [(one["path"], one["type"].rpartition(".")[2]) for one in modules] == [
            ("", "Transformer"),
            ("1_Pooling", "Pooling"),
            ("2_Normalize", "Normalize"),
        ]
        pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
        assert pooling.pop("word_embedding_dimension") == ENCODER["hidden_size"]
        assert [name for name, on in pooling.items() if on] == ["pooling_mode_mean_tokens"]
        settings = json.loads((folder / "sentence_bert_config.json").read_text())
        assert settings == {"max_seq_length": 16, "do_lower_case": False}
    assert "library_name: sentence-transformers" in (export / "README.md").read_text()


def test_sentence_transformers_gives_the_same_embeddings(trained: tuple[Any, list[str], np.ndarray]) -> None:
    library = pytest.importorskip("sentence_transformers", reason="needs sentence-transformers")
    run, lines, wanted = trained
    opened = library.SentenceTransformer(str(run.directory / "model"), device="cpu")
    np.testing.assert_allclose(opened.encode(lines), wanted, atol=1e-6)
    assert opened.similarity_fn_name == "cosine"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"batch": {"global_size": 1, "micro_size": 1}}, "batch.global_size: with one row there is nothing"),
        ({"chat": {}}, "chat: embedding reads no conversations"),
        ({"data": {**job()["data"], "packing": "documents"}}, "embedding reads a few texts a row; set `padded`"),
        ({"preference": {"beta": 0.2}}, "embedding learns no preferences"),
        ({"task": {"name": "causal_lm"}, "embedding": {}}, "causal_lm learns no embeddings"),
        ({"task": {"name": "reward"}, "embedding": {}}, "reward learns no embeddings"),
        ({"task": {"name": "embedding", "num_labels": 2}}, "task.num_labels: embedding has no classes"),
        ({"eval": {"metrics": ["accuracy"]}}, "embedding always reports accuracy, recall_at_5"),
        ({"sample": {"prompt": "Once"}}, "sample: embedding writes no text"),
        ({"model": {**job()["model"], "neftune_alpha": 5.0}}, "noise is for rows of one text"),
        ({"task": {"name": "embedding", "label_smoothing": 0.1}}, "no cross-entropy of tokens or classes"),
        ({"length": {"tokens": 100}}, "length.tokens: rows of embedding are of any length"),
        ({"data": {**job()["data"], "train": [{"path": "x.csv", "pair_field": "b"}]}}, "`pair_field` of a source"),
        ({"data": {**job()["data"], "train": [{"path": "x.csv", "text_field": "b"}]}}, "name texts in `fields`"),
        ({"data": {**job()["data"], "train": [{"path": "x.csv", "label_field": "b"}]}}, "reads no labels"),
        ({"data": {**job()["data"], "train": [{"path": "x.csv", "fields": {"text": "b"}}]}}, "there is no text; it"),
        ({"embedding": {"pooling": "max"}}, "embedding.pooling"),
        ({"embedding": {"scale": 0.0}}, "embedding.scale"),
        ({"checkpoint": {"keep_best_by": "validation_recall"}}, "did you mean 'validation_recall_at_5'"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        validate_recipe({**job(), **sections}, tasks=BUILT_IN)


@pytest.mark.parametrize(
    ("model", "pooling", "words"),
    [
        (base()["model"], "cls", "embedding.pooling: `cls` is the first token, which sees no other in a llama"),
        ({"config": {"model_type": "t5"}}, "mean", "a t5 is an encoder and a decoder"),
    ],
)
def test_networks_without_such_an_embedding_are_refused(
    model: dict[str, Any], pooling: str, words: str, tmp_path: Path
) -> None:
    texts(tmp_path)
    with pytest.raises(RecipeError, match=re.escape(words)):
        run_here(of_encoder(tmp_path, model=model, embedding={"pooling": pooling}))


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"anchor": "w1", "positive": " "}], "line 1: the positive, in the field 'positive', is empty"),
        ([{"anchor": "w1", "positive": "w2"}, {"anchor": 3, "positive": "w2"}], "line 2: the anchor, in the field"),
        ([{"anchor": "w1", "text": "w2"}], "'positive', is missing; the fields are anchor, text. Mend"),
        ([{"query": "w1", "positive": "w2", "negative": ""}], "the negative, in the field 'negative', is empty"),
        (["w1"], "line 1: a record is an object with fields, got a text"),
    ],
)
def test_a_broken_record_is_named(records: list[Any], words: str, tmp_path: Path) -> None:
    texts(tmp_path)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(DataError, match=re.escape(words)):
        run_here(of_encoder(tmp_path))


def test_sources_are_read_alike_whatever_their_format_and_names(tmp_path: Path) -> None:
    """The same batches, but for what is left out as broken."""
    records = [{**record, "anchor": f" {record['anchor'].upper()}\n"} for record in texts(tmp_path, 8, negative=False)]
    renamed = [{"query": r["anchor"], "positive": r["positive"]} for r in records]
    nested = [{"q": r["anchor"], "a": [{"text": r["positive"]}], "more": 1} for r in records]
    table = "sentence1\tsentence2\n" + "".join(f"{r['anchor'].strip()}\t{r['positive']}\n" for r in records)
    (tmp_path / "renamed.json").write_text(json.dumps([*renamed, {"query": "w1", "positive": ""}]))
    (tmp_path / "nested.jsonl").write_text("".join(json.dumps(record) + "\n" for record in nested))
    (tmp_path / "table.tsv").write_text(table)
    sources = [{"path": str(tmp_path / name)} for name in ("renamed.json", "nested.jsonl", "table.tsv")]
    sources[1]["fields"] = {"anchor": "q", "positive": "a.0.text"}  # type: ignore[assignment]
    tree = of_encoder(tmp_path, checks={"max_broken": 1, "max_left_out": 1.0})
    data = {**tree["data"], "train": sources, "lowercase": True, "strip": True}
    recipe = validate_recipe({**tree, "data": data}, tasks=BUILT_IN)
    ready = named_task(recipe).build_data(recipe, True)
    assert ready.train is not None
    assert len(ready.train) == 24
    batches = [ready.train.batch(np.arange(first, first + 8)) for first in (0, 8, 16)]
    assert batches[0]["input_ids"].shape[0] == 16
    wanted = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")(
        [r["anchor"].strip().lower() for r in records] + [r["positive"] for r in records],
        padding=True,
        truncation=True,
        max_length=16,
        return_tensors="pt",
    )
    for batch in batches:
        for name in ("input_ids", "attention_mask"):
            assert torch.equal(batch[name], wanted[name])
    report = ready.report["train"]
    assert (report["broken"], report["sources"][1]["unread"]) == ({"no text": 1}, ("more",))
    computed = ready.train.num_computed(np.arange(8))  # type: ignore[attr-defined]
    assert computed == int(wanted["attention_mask"].sum())
    assert report["useful_share"] == pytest.approx(computed / (16 * 16))
    form = EmbeddingForm(Tolerance(), strip=True, lowercase=False)
    assert form.read({"anchor": " W1\n", "positive": "w2"}, "here") == '["W1", "w2"]'


def test_sources_with_and_without_negatives_are_refused(tmp_path: Path) -> None:
    texts(tmp_path / "one", negative=False)
    texts(tmp_path)
    tree = of_encoder(tmp_path)
    train = [*tree["data"]["train"], {"path": str(tmp_path / "one" / "texts.jsonl")}]
    with pytest.raises(DataError, match="24 of 48 records have a negative"):
        run_here({**tree, "data": {**tree["data"], "train": train}})

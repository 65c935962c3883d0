"""Words with tags: how they are read and tokenized, spans by hand, every backend, and what is written and predicted."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exports import opened_here
from filelock import FileLock
from harness import Launcher, assert_same_path
from inside import run_here, stop_after
from recipes_for_tests import ARCHITECTURES, MODEL, SGD, base
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertForTokenClassification, PreTrainedTokenizerFast, pipeline

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.data.sources.readers import Fields, read_file
from finetune.data.tokenization.tokenizer import Encoder
from finetune.export import verify_export
from finetune.tasks.tag_spans import TagScheme, count_spans, list_spans
from finetune.tasks.task import TaskData
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.tasks.token_classification import TOKEN_CLASSIFICATION
from finetune.utils.errors import DataError, RecipeError

BERT = ARCHITECTURES["bert"]["model"]["config"]
TAGS = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
NAMES = {
    "PER": ["Anna Stone", "Bert", "Carla Neil", "Dora van Dyke"],
    "LOC": ["Berlin", "New York", "Rio de Janeiro"],
}
FRAMES = ["{PER} flew to {LOC} .", "In {LOC} , {PER} met {PER} .", "{PER} left .", "Nobody knows {LOC} or {LOC} ."]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)


def sentence(number: int) -> tuple[list[str], list[str]]:
    """Words and their tags."""
    choose = random.Random(number)
    words, tags = [], []
    for part in FRAMES[number % len(FRAMES)].split():
        kind = part.strip("{}")
        found = choose.choice(NAMES[kind]).split() if kind in NAMES else [part]
        words += found
        tags += [f"{'I' if n else 'B'}-{kind}" if kind in NAMES else "O" for n in range(len(found))]
    return words, tags


SENTENCES = [sentence(number) for number in range(80)]


def save(file: Path, records: Any = None) -> str:
    rows = [{"tokens": w, "ner_tags": t} for w, t in SENTENCES] if records is None else records
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def save_tokenizer(folder: Path) -> str:
    """BERT's kind, of lower-case letters: `anna` is `a`, `##n`, `##n`, `##a`."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *".,'", *letters, *(f"##{letter}" for letter in letters)]
    inner = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=inner, **special).save_pretrained(folder)
    return str(folder)


def job(file: str, tokenizer: str, **sections: Any) -> dict[str, Any]:
    source = {"path": file, "text_field": "tokens", "label_field": "ner_tags"}
    tree = base(
        task={"name": "token_classification"},
        model={"config": BERT},
        tokenizer={"name": tokenizer},
        data={"train": [source], "validation": [], "packing": "padded", "sequence_length": 64},
        length={"steps": 6},
    )
    tree["data"]["validation_fraction"] = 0.25
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return tree


def data_of(tmp_path: Path, records: Any = None, **sections: Any) -> TaskData:
    file = save(tmp_path / "words.jsonl", records)
    data = {"validation_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **sections.pop("data", {})}
    tree = job(file, save_tokenizer(tmp_path / "tokenizer"), data=data, **sections)
    recipe = validate_recipe(tree, None, BUILT_IN)
    return find_task(recipe).build_data(recipe, True)


BACKENDS = [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ("ddp", "fsdp", "zero3")]


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    place = launcher.shared / "tagged"
    with FileLock(f"{place}.lock"):
        if not place.exists():
            save_tokenizer(place)
            save(place / "words.jsonl")
    file = str(place / "words.jsonl")
    sgd = {**SGD, "lr": 0.3, "args": {}}
    jobs = {
        "words": job(file, str(place), task={"class_weights": "balanced"}, optim=sgd),
        "lora": job(file, MODEL, model={"name": MODEL, "config": None}, lora={"rank": 4}, optim={"lr": 0.01}),
    }
    return dict.fromkeys(("single", "ddp", "fsdp", "zero3"), jobs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_takes_the_single_process_path(launcher: Launcher, backend: str) -> None:
    """Figures of spans are those of one process: rows lie on several ranks, and in batches of other widths."""
    jobs = LAUNCHED_RUNS(launcher)[backend]
    for name in jobs:
        single, other = launcher.many("single", jobs)[name], launcher.many(backend, jobs)[name]
        assert_same_path(single, other, 1e-4)
        for figure in ("loss", "accuracy", "precision", "recall", "f1"):
            one, two = (run.validation(f"validation_{figure}") for run in (single, other))
            assert one == pytest.approx(two, rel=1e-3, abs=1e-6 if figure != "loss" else 1e-4)


def conlleval(tags: list[str]) -> list[tuple[int, int, str]]:
    """Spans by the rules of conlleval.pl (Tjong Kim Sang, 2004): its `endOfChunk` and `startOfChunk`."""
    spans, begin = [], 0
    before, kind_before = "O", ""
    for place, tag in enumerate([*tags, "O"]):
        part, _, kind = tag.partition("-")
        ends = (before, part) in {("B", "B"), ("B", "O"), ("I", "B"), ("I", "O"), ("B", "S"), ("I", "S")}
        ends = ends or before in ("E", "S") or (before != "O" and kind_before != kind)
        starts = part in ("B", "S") or (before in ("E", "S", "O") and part in ("E", "I"))
        starts = starts or (part != "O" and kind_before != kind)
        if ends:
            spans.append((begin, place, kind_before))
        if starts:
            begin = place
        before, kind_before = part, kind
    return spans


def test_spans_are_those_of_conlleval() -> None:
    tags = ["O", *(f"{part}-{kind}" for part in "BIES" for kind in ("PER", "LOC"))]
    scheme, choose = TagScheme.of(tags), random.Random(5)
    rows = [[choose.randrange(len(tags)) for _ in range(choose.randrange(10))] for _ in range(400)]
    for row in rows:
        assert list_spans(row, scheme) == conlleval([tags[number] for number in row])
    # Counted together, with tokens between the words that none begins at.
    lengths = [2 * len(row) for row in rows]
    sides = torch.full((2, len(rows), 20), -100)
    sides[0] = 7
    expected = torch.zeros(len(scheme.kinds), 3)
    for number, row in enumerate(rows):
        guess = [choose.choice([tag, tag, 0, 3]) for tag in row]
        sides[:, number, 1 : lengths[number] : 2] = torch.tensor([guess, row])
        found, true = ({*list_spans(side, scheme)} for side in (guess, row))
        for column, spans in enumerate((found & true, found, true)):
            for _, _, kind in spans:
                expected[scheme.kinds.index(kind), column] += 1
    assert torch.equal(count_spans(sides[0], sides[1], scheme), expected)


def test_figures_by_hand() -> None:
    """Anna Stone is cut short, Berlin is taken for a person, and Rio is right."""
    true = [[1, 3, 4, 0, 4, 0]]
    predicted = [[1, 4, 4, 1, 4, 0]]
    counts = count_spans(torch.tensor(predicted), torch.tensor(true), TagScheme.of(TAGS))
    assert TOKEN_CLASSIFICATION.evaluation is not None
    figures = TOKEN_CLASSIFICATION.evaluation.figures_of(counts.flatten().tolist(), None, TAGS)
    assert figures.whole == pytest.approx({"precision": 1 / 3, "recall": 1 / 3, "f1": 1 / 3})
    assert figures.classes == {
        "LOC": {"rows": 2, "predicted": 1, "precision": 1.0, "recall": 0.5, "f1": pytest.approx(2 / 3)},
        "PER": {"rows": 1, "predicted": 2, "precision": 0.0, "recall": 0.0, "f1": 0.0},
    }


@pytest.mark.parametrize(
    ("names", "classes", "spans"),
    [
        (("NOUN", "VERB"), [0, 0, 1], [(0, 1, "NOUN"), (1, 2, "NOUN"), (2, 3, "VERB")]),
        (("LOC", "O", "PER"), [0, 0, 2, 1, 2], [(0, 2, "LOC"), (2, 3, "PER"), (4, 5, "PER")]),
        (("B", "I", "O"), [0, 1, 2, 1], [(0, 2, "span"), (3, 4, "span")]),
        (("B", "E", "M", "S"), [0, 2, 1, 3, 0, 1], [(0, 3, "span"), (3, 4, "span"), (4, 6, "span")]),
    ],
)
def test_plain_tags(names: tuple[str, ...], classes: list[int], spans: list[tuple[int, int, str]]) -> None:
    assert list_spans(classes, TagScheme.of(names)) == spans


def test_tags_stand_at_the_first_token_of_a_word(tmp_path: Path) -> None:
    """As `is_split_into_words` of transformers has it."""
    data = data_of(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    batch = data.train.batch(np.arange(8))
    for row, (words, tags) in enumerate(SENTENCES[:8]):
        alone = tokenizer(words, is_split_into_words=True)
        ids, places = alone["input_ids"], alone.word_ids()
        first = [place is not None and place not in places[:n] for n, place in enumerate(places)]
        wanted = [TAGS.index(tags[place]) if new else -100 for place, new in zip(places, first, strict=True)]
        assert batch["input_ids"][row, : len(ids)].tolist() == ids
        assert batch["targets"][row].tolist() == wanted + [-100] * (batch["targets"].shape[1] - len(ids))
    assert data.train.num_targets(np.arange(8)) == sum(len(words) for words, _ in SENTENCES[:8])
    assert data.label_names == TAGS


@pytest.mark.parametrize("name", ["bert", MODEL])
def test_every_word_has_one_token_that_begins_it(tmp_path: Path, name: str) -> None:
    """With byte-level tokens too, which hold the space before a word, and with words that have no token."""
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path) if name == "bert" else name)
    lists = [["Anna", "\u200b", "O'Neil", "é", "a.b", "x" * 30], [], ["\u200b"] if name == "bert" else ["\u00a0"]]
    found = Encoder(tokenizer, num_workers=1, learned="tags").encode([json.dumps(words).encode() for words in lists])
    assert found.words is not None
    parts = np.split(found.words, np.cumsum(found.lengths)[:-1])
    begun = [number for number in parts[0].tolist() if number >= 0]
    assert begun == ([0, 2, 3, 4, 5] if name == "bert" else [0, 1, 2, 3, 4, 5])
    assert parts[1].size == 0
    starts = np.flatnonzero(parts[0] >= 0).tolist()
    last = tokenizer.decode(found.numbers[starts[-1] : found.lengths[0]])
    assert "".join(filter(str.isalpha, last)) == "x" * 30
    if name != "bert":
        plain = " ".join(lists[0])
        assert found.numbers[: found.lengths[0]].tolist() == tokenizer.encode(plain, add_special_tokens=False)


def test_long_rows_weights_and_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"tokens": ["ab"] * 4, "ner_tags": ["B-LOC", "O", "O", "O"]}, {"tokens": ["ab"], "ner_tags": ["O"]}]
    source = {"path": save(tmp_path / "words.jsonl", records), "text_field": "tokens", "label_field": "ner_tags"}
    more = {"train": [{**source, "weight": 2.0}], "sequence_length": 7}
    data = data_of(tmp_path, records, data=more, task={"class_weights": "balanced"})
    # Each word has two tokens, and two go around a row: of the first, the third word is cut in its midst.
    batch = data.train.batch(np.arange(4))
    assert batch["targets"][:2, :8].tolist() == [[-100, 0, -100, 1, -100, 1, -100], [-100, 1] + [-100] * 5]
    assert torch.equal(batch["targets"][:2], batch["targets"][2:])
    assert (data.report["train"]["labels_cut"], data.report["train"]["truncated"]) == (2, 2)
    assert "2 words behind the end of a row, whose tags are lost" in "\n".join(data.full_report)
    # 8 words that are learned, 2 of LOC and 6 of O.
    assert data.report["train"]["classes"] == {"B-LOC": 2, "O": 6}
    weights = torch.tensor([8 / (2 * 2), 8 / (2 * 6)])
    expected = torch.where(batch["targets"] >= 0, weights[batch["targets"].clamp(min=0)], 0)
    assert torch.allclose(batch["weights"], expected)
    scores = torch.randn(*batch["targets"].shape, 2)

    class Network(torch.nn.Module):
        def forward(self, **_: Any) -> Any:
            return type("Output", (), {"logits": scores})

    loss = TOKEN_CLASSIFICATION.loss_sum(Network(), batch)
    whole = cross_entropy(scores.transpose(1, 2), batch["targets"], weights, reduction="sum")
    assert loss.item() == pytest.approx(whole.item(), rel=1e-5)


def test_formats_give_the_same_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    words, tags = zip(*SENTENCES[:12], strict=True)
    files = {"jsonl": tmp_path / "a.jsonl", "csv": tmp_path / "a.csv", "conll": tmp_path / "a.conll"}
    save(files["jsonl"], [{"tokens": w, "ner_tags": t} for w, t in SENTENCES[:12]])
    with files["csv"].open("w", newline="") as file:
        csv.writer(file).writerows([["tokens", "ner_tags"], *([" ".join(w), " ".join(t)] for w, t in SENTENCES[:12])])
    blocks = ["".join(f"{w} NN {t}\n" for w, t in zip(*pair, strict=True)) for pair in SENTENCES[:12]]
    files["conll"].write_text("-DOCSTART- -X- O\n\n" + "\n\n".join(blocks))
    bare = read_file(files["conll"], Fields("tokens", None, learned="tags"))
    assert [(json.loads(document.text), document.tags) for document in bare] == [(w, None) for w, _ in SENTENCES[:12]]
    numbers = [[TAGS.index(tag) for tag in row] for row in tags]
    kinds = {
        "tokens": datasets.List(datasets.Value("string")),
        "ner_tags": datasets.List(datasets.ClassLabel(names=TAGS)),
    }
    table = datasets.Dataset.from_dict({"tokens": words, "ner_tags": numbers}, features=datasets.Features(kinds))
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    files |= {"parquet": tmp_path / "a.parquet", "saved": tmp_path / "saved"}
    batches = {}
    for name, path in files.items():
        source = {"path": str(path), "text_field": "tokens", "label_field": "ner_tags"}
        data = data_of(tmp_path / name, data={"train": [source]})
        assert data.label_names == TAGS, name
        batches[name] = data.train.batch(np.arange(12))
    for name, batch in batches.items():
        for key, values in batches["jsonl"].items():
            assert torch.equal(values, batch[key]), name


UD = """\
# sent_id = 1
# text = du vin
1-2\tdu\t_\t_\t_\t_\t_\t_\t_\t_
1\tde\tde\tADP\tP\t_\t3\tcase\t_\t_
2\tle\tle\tDET\tD\t_\t3\tdet\t_\t_
3\tvin rouge\tvin\tNOUN\tNC\t_\t0\troot\t_\t_
3.1\teu\t_\tVERB\t_\t_\t_\t_\t_\t_

"""


@pytest.mark.parametrize(
    ("content", "label", "expected"),
    [
        ("New York\tB-LOC\n10\u00a0000\tO\n\t\n", "x", [(["New York", "10\u00a0000"], ("B-LOC", "O"))]),
        ("10\u00a0000 CD O\n  \n# NN O\n", "x", [(["10\u00a0000"], ("O",)), (["#"], ("O",))]),
        ("# id 6c2c\tdomain=en\nAnna _ _ B-PER\n#1 _ _ O\n", "x", [(["Anna", "#1"], ("B-PER", "O"))]),
        ("# sent_id = 1\nAnna NNP B-NP B-PER\n", "x", [(["Anna"], ("B-PER",))]),
        ("# O\nAnna B-PER\n\n#tag O\n", "x", [(["#", "Anna"], ("O", "B-PER")), (["#tag"], ("O",))]),
        (UD, "label", [(["de", "le", "vin rouge"], ("ADP", "DET", "NOUN"))]),
        (UD, "deprel", [(["de", "le", "vin rouge"], ("case", "det", "root"))]),
    ],
)
def test_columns_of_conll(tmp_path: Path, content: str, label: str, expected: Any) -> None:
    for name in ("a.conll", "a.conllu"):
        (tmp_path / name).write_text(content)
        found = read_file(tmp_path / name, Fields("words", label, learned="tags"))
        assert [(json.loads(document.text), document.tags) for document in found] == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Anna NNP B-PER\nleft VBD\n", "line 2 has 2 columns, and the first 3"),
        ("Anna\tNNP\tB-PER\nNew York B-LOC\n", "line 2 has a word and no tag"),
        (UD.replace("3\tvin", "three"), "line 6 has 9 columns, and the first 10"),
        (UD.replace("ADP", "_"), "line 4: the label in 'label' is missing"),
    ],
)
def test_columns_of_conll_are_counted(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "a.conll").write_text(content)
    with pytest.raises(DataError, match=said):
        list(read_file(tmp_path / "a.conll", Fields("words", "label", learned="tags")))


@pytest.mark.parametrize("shape", ["bert", "lora"])
def test_tags_to_the_end(tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Learned, resumed, evaluated, exported, opened by transformers alone, and predicted from every place."""
    file, tokenizer = save(tmp_path / "words.jsonl"), save_tokenizer(tmp_path / "tokenizer")
    more: dict[str, Any] = {"optim": {"lr": 1e-2}, "length": {"steps": 60}, "output": {"dir": str(tmp_path / "run")}}
    if shape == "lora":
        tokenizer = MODEL
        more |= {"model": {"name": MODEL, "config": None}, "lora": {"rank": 8}}
    tree = job(file, tokenizer, **more)
    tree["data"] |= {"validation": tree["data"]["train"], "validation_fraction": 0.01, "cache_dir": str(tmp_path / "c")}
    tree["checkpoint"] = {"keep_best_by": "validation_f1"}
    run = run_here(tree)
    assert run.results["validation_f1"] > 0.9
    assert [*run.results["classes"]] == ["LOC", "PER"]
    if shape == "bert":
        run_here({**tree, "output": {"dir": str(tmp_path / "again")}}, stop_after(17))
        again = run_here({**tree, "output": {"dir": str(tmp_path / "again")}})
        assert again.losses == run.losses
        assert again.results["classes"] == run.results["classes"]
    assert main.main(["data", str(run.directory / "recipe.yaml"), "--show", "1"]) == 0
    assert "/B-PER]" in capsys.readouterr().out
    assert main.main(["eval", str(run.directory), "--data", file, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    for name in ("loss", "accuracy", "precision", "recall", "f1"):
        assert figures[name] == pytest.approx(run.results[f"validation_{name}"], abs=1e-4)
    assert figures["classes"] == run.results["classes"]
    assert main.main(["predict", str(run.directory), file]) == 0
    predicted = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["tokens"] for line in predicted] == [words for words, _ in SENTENCES]
    found = [line["spans"] for line in predicted]
    true = [list_spans([TAGS.index(tag) for tag in tags], TagScheme.of(TAGS)) for _, tags in SENTENCES]
    hits = sum(
        len({(s["start"], s["end"], s["tag"]) for s in spans} & {*row}) for spans, row in zip(found, true, strict=True)
    )
    assert hits / sum(map(len, true)) == pytest.approx(figures["recall"])
    assert [s["text"] for s in found[0]] == [" ".join(SENTENCES[0][0][s["start"] : s["end"]]) for s in found[0]]
    for place in ["merged"] if shape == "bert" else ["adapter", "merged"]:
        assert main.main(["export", str(run.directory), "--as", place]) == 0
        capsys.readouterr()
        target = tmp_path / f"{place}.csv"
        more_words = ["--text-field", "tokens", "--output", str(target)]
        assert main.main(["predict", str(run.directory / "exports" / place), file, *more_words]) == 0
        rows = list(csv.DictReader(target.read_text().splitlines()))
        wanted = [{"document": n, **span} for n, spans in enumerate(found) for span in spans]
        for row, span in zip(rows, wanted, strict=True):
            assert [row[key] for key in ("document", "text", "tag", "start", "end")] == [
                str(span[key]) for key in ("document", "text", "tag", "start", "end")
            ]
            assert float(row["probability"]) == pytest.approx(span["probability"], abs=1e-3)
    folder = run.directory / "exports" / "merged"
    assert AutoTokenizer.from_pretrained(folder).is_fast
    if shape == "bert":
        assert BertForTokenClassification.from_pretrained(folder).config.id2label == dict(enumerate(TAGS))
        tag = pipeline("token-classification", str(folder), aggregation_strategy="first")
        for (words, _), spans in zip(SENTENCES[:12], found, strict=False):
            entities = tag(" ".join(words))
            ends = np.cumsum([len(word) + 1 for word in words]) - 1
            given = [
                (e["entity_group"], int((ends < e["start"]).sum()), int((ends < e["end"]).sum()) + 1) for e in entities
            ]
            assert given == [(span["tag"], span["start"], span["end"]) for span in spans]
            shares = [float(e["score"]) for e in entities]
            assert shares == pytest.approx([span["probability"] for span in spans], abs=1e-3)
    assert main.main(["eval", str(run.directory), "--data", file]) == 0
    said = capsys.readouterr().out
    assert "F1" in said
    assert "words" in said


def test_a_trained_head_keeps_its_tags(tmp_path: Path) -> None:
    from transformers import BertConfig

    names = ["O", *TAGS[:4]]
    config = BertConfig(
        **{**BERT, "vocab_size": 64}, id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    torch.manual_seed(0)
    BertForTokenClassification(config).save_pretrained(tmp_path / "head")
    model = {"model": {"name": str(tmp_path / "head"), "config": None}}
    data = data_of(tmp_path, **model)
    assert data.label_names == tuple(names)
    assert data.train.batch(np.arange(1))["targets"][0, 1].item() == names.index(SENTENCES[0][1][0])
    with pytest.raises(DataError, match=r"ORG.* but the trained head of .* has the classes O, B-LOC"):
        data_of(tmp_path / "other", [{"tokens": ["a"], "ner_tags": ["ORG"]}] * 9, **model)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"tokens": ["a", "b"], "ner_tags": ["O"]}, "line 2: 'tokens' has 2 words and 'ner_tags' has 1 tags"),
        ({"tokens": ["a", " "], "ner_tags": ["O", "O"]}, "line 2: word 2 in 'tokens' is blank"),
        ({"tokens": ["a", 7], "ner_tags": ["O", "O"]}, "line 2: word 2 in 'tokens' is a number"),
        ({"tokens": ["a"], "ner_tags": [None]}, "line 2: the label in 'ner_tags' is missing"),
        ({"tokens": ["a"], "ner_tags": [["O"]]}, "line 2: the label in 'ner_tags' is a list"),
        (
            {"tokens": 3, "ner_tags": ["O"]},
            "line 2: the field 'tokens' holds a number, .* another field as `text_field`",
        ),
        (
            {"tokens": "Anna left", "ner_tags": [[0, 4, "PER"]]},
            "'ner_tags' has 1 tags.* Spans of characters, as doccano",
        ),
        ({"tokens": "Anna", "ner_tags": [{"start": 0, "end": 4}]}, "'ner_tags' has 1 tags.* Spans of characters"),
        ({"tokens": ["a"], "ner_tags": "['O']"}, "line 2: the field 'ner_tags' holds a list that was written as text"),
        (
            {"tokens": ["a"], "tags": ["O"]},
            "line 2: there is no field 'ner_tags'; .* such as data.train.0.label_field=tags",
        ),
        ({"tokens": ["a"], "ner_tags": [4]}, r"The first number is 4 \(.*\), and the first text 'O' \(.*, line 1\)"),
    ],
)
def test_bad_records_are_refused(tmp_path: Path, record: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        data_of(tmp_path, [{"tokens": ["a"], "ner_tags": ["O"]}, record])


def test_other_bad_input_is_refused(tmp_path: Path) -> None:
    held = {"path": save(tmp_path / "held.jsonl", [{"tokens": ["a"], "ner_tags": ["B-ORG"]}])}
    with pytest.raises(DataError, match="validation documents have labels that no training document has: B-ORG"):
        data_of(tmp_path, data={"validation": [{**held, "text_field": "tokens", "label_field": "ner_tags"}]})
    bare = tmp_path / "bare.conll"
    bare.write_text("Anna B-PER\nleft\n")
    with pytest.raises(DataError, match=r"bare.conll, line 2 has a word and no tag"):
        data_of(tmp_path, data={"train": [{"path": str(bare)}]})
    with pytest.raises(DataError, match=r"bare.conll holds a word in each line, which is for tasks that tag words"):
        data_of(tmp_path, data={"train": [{"path": str(bare)}]}, task={"name": "sequence_classification"})


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        backend_tokenizer = None

    with pytest.raises(DataError, match=r"The tokenizer Slow has no fast form \(tokenizer.json\)"):
        Encoder(Slow(), num_workers=1, learned="tags").encode([b'["a"]'])


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"eval": {"metrics": ["accuracy"]}}, "token_classification always reports accuracy, precision, recall, f1"),
        ({"data": {"packing": "documents"}}, "data.packing: token_classification reads one document a row"),
        ({"checkpoint": {"keep_best_by": "validation_recall_macro"}}, "no evaluation has 'validation_recall_macro'"),
        ({"data": {"train": [{"path": "x.jsonl", "pair_field": "b"}]}}, "token_classification reads one text"),
    ],
)
def test_what_contradicts_is_said(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        validate_recipe(job("x.jsonl", "t", **sections), None, BUILT_IN)

"""What data takes in memory does not grow with its size, but for some bytes a document."""

import csv
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from harness import python

from finetune.config.recipe_schema import Source
from finetune.data.rows import packed_rows
from finetune.data.sources import streams
from finetune.data.sources.corpus import Rules, choose_texts, open_source
from finetune.data.sources.readers import Fields, read_file
from finetune.data.synthetic import story_generator
from finetune.utils.errors import DataError

MIB = 1 << 20
TEXTS = [f"{number} {story.text}" for number, story in enumerate(story_generator.stories(500))]


def many(size: int) -> list[str]:
    """Documents of `size` bytes of text in all."""
    each = sum(map(len, TEXTS))
    return TEXTS * (size // each)


def write_txt(path: Path, texts: list[str]) -> None:
    path.write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts))


def write_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def write_json(path: Path, texts: list[str]) -> None:
    path.write_text(json.dumps([{"text": text} for text in texts]))  # one line


def write_csv(path: Path, texts: list[str]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["text"], *([text] for text in texts)])


def write_parquet(path: Path, texts: list[str]) -> None:
    table = pyarrow.table({"text": [f"{number} {text}" for number, text in enumerate(texts)]})
    pyarrow.parquet.write_table(table, path, row_group_size=2000, compression="none", use_dictionary=False)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.txt", write_txt),
        ("a.jsonl", write_jsonl),
        ("a.json", write_json),
        ("a.csv", write_csv),
        ("a.parquet", write_parquet),
    ],
)
def test_files_are_read_in_parts(tmp_path: Path, name: str, write: Callable[[Path, list[str]], None]) -> None:
    texts = many(24 * MIB)
    write(tmp_path / name, texts)
    num_texts = len(texts)
    del texts
    tracemalloc.start()
    arrow = count = 0
    before = pyarrow.total_allocated_bytes()
    try:
        for _ in read_file(tmp_path / name, Fields("text", None)):
            count += 1
            arrow = max(arrow, pyarrow.total_allocated_bytes() - before)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == num_texts
    assert peak < 9 * MIB
    assert arrow < 9 * MIB
    assert (arrow > 0) == (name == "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "one line of some words\n" * 9, r"a.txt, line 1: .*longer than .*<\|endoftext\|>"),
        ("a.txt", "short\n<|endoftext|>\n" + "x y\n" * 99, r"a.txt, line 3: .*longer than"),
        ("a.jsonl", '{"text": "fits"}\n{"text": "' + "x" * 300 + '"}\n', r"a.jsonl, line 2 is longer than .*\.json"),
        ("a.jsonl", '{"text": "' + "x" * 110 + '"}\n', r"a.jsonl, line 1: the document is longer than"),
        ("a.json", '[{"text": "fits"},\n{"text": "' + "x" * 300, r"a.json, line 2 .*longer than .*or does not end"),
        ("a.csv", 'text\nfits\n"' + "x\n" * 300, r"a.csv, line .*field larger than field limit"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, message: str
) -> None:
    for module in ("streams", "readers", "corpus"):
        monkeypatch.setattr(f"finetune.data.sources.{module}.MAX_DOCUMENT_BYTES", 100)
    monkeypatch.setattr("finetune.data.sources.streams.MAX_RECORD_BYTES", 200)
    monkeypatch.setattr("finetune.data.sources.readers.MAX_RECORD_BYTES", 200)
    monkeypatch.setattr(streams, "_CHUNK", 32)
    (tmp_path / name).write_text(content)
    corpus = open_source(Source(path=str(tmp_path / name)))
    with pytest.raises(DataError, match=message):
        list(choose_texts(corpus, Rules(True, False, 0.0)))


def test_a_wrong_item_is_found_before_the_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('["fits",\n{"text" "no colon"},' + json.dumps(many(16 * MIB))[1:])
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"a.json, line 2 is not valid JSON: Expecting ':' delimiter"):
            list(read_file(path, Fields("text", None)))
        assert tracemalloc.get_traced_memory()[1] < 9 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_packing_takes_some_bytes_a_document(long_documents: packed_rows.LongDocuments) -> None:
    lengths = np.random.default_rng(0).integers(2, 1000, 200_000)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tracemalloc.start()
    try:
        packed_rows.pack_documents(offsets, 1024, long_documents)
        assert tracemalloc.get_traced_memory()[1] < 72 * lengths.size
    finally:
        tracemalloc.stop()


PROGRAM = """
import sys
from pathlib import Path
from finetune.config.recipe import validate_recipe
from finetune.data import progress_bar
from finetune.data.prepare import prepare_data

advance = progress_bar.Bar.advance

def advanced(self, *words):
    global peak
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = max(peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon")))
    advance(self, *words)

progress_bar.Bar.advance = advanced
for name in sys.argv[2:]:
    peak = 0
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"name": sys.argv[1]},
        "data": {"train": [{"path": name, "weight": 1.5}], "cache_dir": name + ".cache", "num_workers": 2},
        "length": {"steps": 0},
    }
    data = prepare_data(validate_recipe(tree), quiet=True)
    print(data.report.train.documents, peak, flush=True)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_tokenising_takes_some_bytes_a_document(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "</s>": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(str(tmp_path / "words"))
    sizes = {"small.txt": 6 * MIB, "large.txt": 30 * MIB}
    for name, size in sizes.items():
        write_txt(tmp_path / name, many(size))
    output, _ = python("-c", PROGRAM, str(tmp_path / "words"), *(str(tmp_path / name) for name in sizes))
    small, large = [list(map(int, line.split())) for line in output.splitlines()]
    documents, peak = (b - a for a, b in zip(small, large, strict=True))
    assert documents > 25_000
    # What the allocator keeps moves by a few MiB from run to run; the text has grown by 24.
    assert peak < 80 * documents + 6 * MIB

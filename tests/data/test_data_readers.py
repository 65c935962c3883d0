"""Each kind of file, and each way in which it can be broken."""

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import pickle
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testdata import MADE, REAL

from finetune.config.recipe_schema import Source
from finetune.data.rows.kinds import classes, source_target, tags
from finetune.data.rows.kinds.row_kind import RowKind
from finetune.data.sources import streams
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.corpus import Corpus, Rules, choose_texts, open_source
from finetune.data.sources.readers import Fields, read_file
from finetune.utils.errors import DataError

TEXT_ONLY = Fields("text", None)
TEXTS = ["One line.", 'Two\nlines, with "quotes"', "Grüße, 世界 🌍", ""]


def texts(path: Path, **options: Any) -> list[str]:
    return [document.text for document in read_file(path, Fields(options.get("field", "text"), None))]


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def message(path: Path, fields: Fields = TEXT_ONLY) -> str:
    with pytest.raises(DataError) as caught:
        list(read_file(path, fields))
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


@pytest.mark.parametrize("ending", ["\n", ""])
def test_txt_ends_documents_at_marker_lines(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / "a.txt", f"one\ntwo\n<|endoftext|>\n\n<|endoftext|>\nlast{ending}")
    assert texts(path) == ["one\ntwo\n", "\n", f"last{ending}"]


def test_txt_without_a_marker_is_one_document(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", "\ufeffone\r\n\r\ntwo <|endoftext|> three")) == [
        "one\n\ntwo <|endoftext|> three"
    ]


@pytest.mark.parametrize(
    "path",
    [
        MADE / "stories" / "endoftext.txt",
        pytest.param(REAL / "tinystories" / "sample_endoftext.txt", marks=pytest.mark.real_data),
    ],
    ids=["made", "real"],
)
def test_txt_of_stories(path: Path) -> None:
    stories = texts(path)
    assert len(stories) == path.read_text().count("<|endoftext|>") > 3
    assert all(story.startswith("Once upon a time") or story.strip() for story in stories)


def test_jsonl(tmp_path: Path) -> None:
    lines = "\n\n".join(json.dumps({"text": text, "id": 1}) for text in TEXTS)
    assert texts(write(tmp_path / "a.jsonl", lines)) == TEXTS


def test_json_list_of_objects_of_texts_and_lines(tmp_path: Path) -> None:
    records = [{"text": text} for text in TEXTS]
    assert texts(write(tmp_path / "a.json", json.dumps(records, indent=2))) == TEXTS
    assert texts(write(tmp_path / "b.json", json.dumps(TEXTS))) == TEXTS
    assert texts(write(tmp_path / "c.json", "\n".join(map(json.dumps, records)))) == TEXTS
    assert texts(write(tmp_path / "d.json", " [ ] ")) == []


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.text(max_size=30), max_size=12),
    indent=st.sampled_from([None, 0, 3]),
    chunk=st.integers(1, 40),
)
def test_json_lists_are_read_in_parts(
    tmp_path_factory: pytest.TempPathFactory, items: list[str], indent: int | None, chunk: int
) -> None:
    path = tmp_path_factory.mktemp("json") / "a.json"
    path.write_text(json.dumps([{"text": item, "n": [1, {"a": 2}]} for item in items], indent=indent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "_CHUNK", chunk)
        assert texts(path) == items


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([text, number] for number, text in enumerate(TEXTS))
        writer.writerow(["x" * 300_000, "good"])
    documents = list(read_file(path, Fields("text", "label")))
    assert [d.text for d in documents[:-1]] == TEXTS
    assert [d.labels[0] for d in documents] == ["0", "1", "2", "3", "good"]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2, 3, 4], "text": TEXTS}), path, row_group_size=2)
    assert texts(path) == TEXTS
    assert "the fields are id, text" in message(path, Fields("body", None))


def test_a_missing_text_is_an_empty_one_in_every_format(tmp_path: Path) -> None:
    """As CSV has it, which can write nothing else."""
    write(tmp_path / "a.csv", 'text,label\n"a",x\n"",y\n')
    write(tmp_path / "a.jsonl", '{"text": "a", "label": "x"}\n{"text": null, "label": "y"}\n')
    table = pyarrow.table({"text": ["a", None], "label": ["x", "y"]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"text": ["a", None], "label": ["x", "y"]}).save_to_disk(str(tmp_path / "saved"))
    for name in ("a.csv", "a.jsonl", "a.parquet", "saved"):
        for labelled in (True, False):
            source = Source(path=str(tmp_path / name))
            documents = list(open_source(source, classes.KIND.fields(source, labels=labelled)).documents())
            assert [document.text for document in documents] == ["a", ""], name
    source = Source(path=str(tmp_path / "a.jsonl"), pair_field="text")
    pairs = open_source(source, source_target.KIND.fields(source))
    with pytest.raises(DataError, match="line 2: the field 'text' is empty, and both source and target need a text"):
        list(pairs.documents())


def test_saved_data_sets(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"text": TEXTS, "label": [0, 1, 0, 1]})
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([2])}).save_to_disk(str(tmp_path / "dict"))
    source = Source(path=str(tmp_path / "one"))
    one = open_source(source, classes.KIND.fields(source))
    assert [(d.text, *d.labels) for d in one.documents()] == list(zip(TEXTS, [0, 1, 0, 1], strict=True))
    test = open_source(Source(path=str(tmp_path / "dict"), split="test"))
    assert [d.text for d in test.documents()] == [TEXTS[2]]
    with pytest.raises(DataError, match=r"no split 'dev'; its splits are test, train"):
        open_source(Source(path=str(tmp_path / "dict"), split="dev"))
    with pytest.raises(DataError, match=r"holds the splits test, train, which would be read as one"):
        open_source(Source(path=str(tmp_path / "dict")))
    with pytest.raises(DataError, match=r"one has no split 'train'; nor any other"):
        open_source(Source(path=str(tmp_path / "one"), split="train"))
    with pytest.raises(DataError, match="no field 'story'; the fields are text, label"):
        list(open_source(Source(path=str(tmp_path / "one"), text_field="story")).documents())


def test_globs_are_sorted_and_limits_hold(tmp_path: Path) -> None:
    for name in "bca":
        write(tmp_path / f"{name}.txt", f"text {name}")
    write(tmp_path / "[x].txt", "brackets")
    source = open_source(Source(path=f"{tmp_path}/?.txt"))
    assert [d.text for d in source.documents()] == ["text a", "text b", "text c"]
    source = open_source(Source(path=f"{tmp_path}/?.txt", limit=2))
    assert [d.text for d in source.documents()] == ["text a", "text b"]
    source = open_source(Source(path=f"{tmp_path}/[x].txt"))
    assert [d.text for d in source.documents()] == ["brackets"]


def test_fingerprints_follow_content_not_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "x.txt", "same")

    def print_of(path: Path, **options: Any) -> object:
        return open_source(Source(path=str(path), **options)).fingerprint

    first = print_of(tmp_path / "a" / "x.txt")
    assert first == print_of(tmp_path / "b" / "x.txt")
    assert first != print_of(tmp_path / "a" / "x.txt", limit=3)
    write(tmp_path / "b" / "x.txt", "else")
    assert first != print_of(tmp_path / "b" / "x.txt")


@pytest.mark.parametrize("given", ["nothing.jsonl", "*.jsonl"])
def test_nothing_there(tmp_path: Path, given: str) -> None:
    with pytest.raises(DataError, match=r"There is no file .*looked from"):
        open_source(Source(path=str(tmp_path / given)))


def test_a_directory_is_read_with_those_below_it(tmp_path: Path) -> None:
    for folder in ("a", "b/c", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), tmp_path / "a" / "1.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["two"]}), tmp_path / "b" / "c" / "2.parquet")
    write(tmp_path / ".hidden" / "3.txt", "hidden")

    def opened(place: str) -> Corpus:
        return open_source(Source(path=f"{tmp_path}{place}"))

    assert [d.text for d in opened("").documents()] == ["one", "two"]
    assert opened("").files == ""
    # A glob of folders alone is those folders.
    assert [d.text for d in opened("/?").documents()] == ["one", "two"]
    write(tmp_path / "README.md", "# About")
    write(tmp_path / "z.jsonl", '{"text": "three"}\n')
    assert [d.text for d in opened("").documents()] == ["one", "two", "three"]
    assert opened("").files == "2 .parquet, 1 .jsonl; not read: README.md"
    write(tmp_path / "z.jsonl", '{"body": "three"}\n')
    with pytest.raises(DataError, match=r"no field 'text'.*several formats \(2 .parquet, 1 .jsonl\)"):
        list(opened("").documents())
    # What is data in another dress is not passed over.
    write(tmp_path / "b" / "4.jsonl.gz", gzip.compress(b"{}"))
    with pytest.raises(DataError, match="is gzip-compressed"):
        list(opened("/b").documents())


SPLITS = {
    "data/train-00000-of-00002.parquet": "train",
    "data/train-00001-of-00002.parquet": "train",
    "data/test_sft-00000-of-00001-ab12.parquet": "test_sft",
    "more/a_dev.jsonl": "validation",
    "test/b.jsonl": "test",
    "contest/latest-training.2.jsonl": "train",
    "attested.jsonl": None,
}


@pytest.mark.parametrize("pattern", ["", "/**"])
def test_a_split_of_a_folder_is_read_alone(tmp_path: Path, pattern: str) -> None:
    for name in SPLITS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.table({"text": [name]}), tmp_path / name)
        else:
            write(tmp_path / name, json.dumps({"text": name}))

    def opened(split: str | None, pattern: str = pattern) -> list[str]:
        source = Source(path=f"{tmp_path}{pattern}", split=split)
        return sorted(document.text for document in open_source(source).documents())

    for split in {*SPLITS.values()} - {None}:
        assert opened(split) == sorted(name for name, of in SPLITS.items() if of == split)
    with pytest.raises(
        DataError, match="holds the splits test, test_sft, train, validation, which would be read as one"
    ):
        opened(None)
    with pytest.raises(DataError, match=r"no split 'dev'; its splits are test, test_sft, train, validation. Name one"):
        opened("dev")
    # A part that has one split alone needs no word.
    assert opened(None, "/test/*") == ["test/b.jsonl"]
    with pytest.raises(DataError, match=r"b.jsonl has no split 'train'; nor any other. Remove the source's `split`"):
        opened("train", "/test/b.jsonl")


def test_a_directory_without_data_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "notes.md", "# Notes")
    with pytest.raises(DataError, match="holds no file that can be read"):
        open_source(Source(path=str(tmp_path)))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_what_divides_columns_is_found(tmp_path: Path, delimiter: str) -> None:
    rows = [["id", "text"], ["1", "Yes; no, and | more"], ["2", 'Two\nlines, "so"; to say'], ["3", ""]]
    with open(tmp_path / "a.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    assert texts(tmp_path / "a.csv") == [text for _, text in rows[1:]]


def test_a_header_alone_does_not_decide(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "id;text, long\n1;a\n2;b, c\n")
    assert texts(path, field="text, long") == ["a", "b, c"]


def test_tsv(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.tsv", "text\tid;no\na, b\t1\n")) == ["a, b"]
    assert texts(write(tmp_path / "b.tsv", "text\na, b\n")) == ["a, b"]


QUOTATION = [('"He came," she said.', "0"), ("No.", "1"), ('"And went', "0"), ('away?" "Yes."', "1")]


@pytest.mark.parametrize("name", ["a.tsv", "a.csv"])
def test_a_quotation_over_rows_divided_by_tabs_swallows_none(tmp_path: Path, name: str) -> None:
    """Most corpora in tables that tabs divide quote nothing; those that quote as CSV does are read as CSV."""
    lines = "".join(f"{text}\t{label}\n" for text, label in [("text", "label"), *QUOTATION])
    found = list(read_file(write(tmp_path / name, lines), Fields("text", "label")))
    assert [(document.text, *document.labels) for document in found] == QUOTATION
    with (tmp_path / name).open("w", newline="") as file:
        csv.writer(file, delimiter="\t").writerows([("text", "label"), *QUOTATION, ("Two\nlines", "1")])
    found = list(read_file(tmp_path / name, Fields("text", "label")))
    assert [(document.text, *document.labels) for document in found] == [*QUOTATION, ("Two\nlines", "1")]
    assert {document.issue for document in found} == {None}
    # Where lines do not have all columns, what may be other rows is said.
    write(tmp_path / name, 'text\tlabel\n"He came.\t0\nAnd\nshe said no"\t1\n"No."\t0\n')
    first, second = read_file(tmp_path / name, Fields("text", "label"))
    assert first.issue == ("swallowed", repr("He came.\t0\nAnd\nshe said no"))
    assert second.issue is None


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"Body": "a", "id": 1}', "`text_field`, such as data.train.0.text_field=Body."),
        ('{"Text here": "a"}', "Name one of them as the source's `text_field`."),
        (
            '{"Question": "a", "The answer": "b", "Answer": "c"}',
            "'chat={}' data.train.0.fields.user=Question data.train.0.fields.assistant=Answer.",
        ),
    ],
)
def test_an_error_proposes_columns(tmp_path: Path, content: str, says: str) -> None:
    path = write(tmp_path / "a.jsonl", content + "\n")
    with pytest.raises(DataError) as caught:
        list(open_source(Source(path=str(path)), Fields("text", source="data.train.0")).documents())
    assert str(caught.value).endswith(says)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("hf://datasets/org/set@main/data/*.parquet", "or name the hub's data set as `hub`: org/set."),
        ("https://example.org/a.jsonl", r"is an address \(https\), .* Download it and name the file."),
        ("s3://bucket/data/", r"is an address \(s3\), and `path` is a place on this machine"),
    ],
)
def test_addresses_are_named(given: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_source(Source(path=given))


def test_a_missing_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"'nobody/nothing'.*cannot be had from the hub"):
        open_source(Source(hub="nobody/nothing"))


@pytest.mark.parametrize("name", ["a.docx", "a"])
def test_unknown_formats_are_refused(tmp_path: Path, name: str) -> None:
    assert "Allowed are .txt, .jsonl, .json, .parquet, .csv" in message(write(tmp_path / name, "x"))


BROKEN = {
    "malformed line": ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2 is not valid JSON"),
    "line that is no object": ("a.jsonl", '{"text": "a"}\n\n[1]\n', "line 3: got a list"),
    "missing field": (
        "a.jsonl",
        '{"body": "a", "id": 1}\n',
        "line 1: there is no field 'text'; the fields are body, id",
    ),
    "text is a number": ("a.jsonl", '{"text": 3}\n', "line 1: the field 'text' holds a number"),
    "text is false": ("a.jsonl", '{"text": false}\n', "line 1: the field 'text' holds a bool"),
    "text is a list": ("a.jsonl", '{"text": ["a"]}\n', "line 1: the field 'text' holds a list"),
    "bytes": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 holds byte 0xff, which is not UTF-8"),
    "bytes in text": ("a.txt", b"one\ntwo\nthr\xe9e\n", "line 3 holds byte 0xe9"),
    "json without list": ("a.json", "3", "line 1 is not valid JSON: it must be a list"),
    "json without end": ("a.json", '[{"text": "a"},\n', "is not valid JSON"),
    "json without comma": ("a.json", '[{"text": "a"}\n{"text": "b"}]', "line 2 is not valid JSON: a comma"),
    "json with a tail": ("a.json", '["a"]\n\nx', "line 3 is not valid JSON: there is something behind"),
    "json item": ("a.json", '["a",\n3]', "item 2: got a number"),
    "json broken inside": ("a.json", '[\n{"text": "a"},\n{"text": b}]', "line 3 is not valid JSON"),
    "csv field": ("a.csv", "id,body\n1,a\n", "there is no field 'text'; the fields are id, body"),
    "csv columns": ("a.csv", "id,text\n1,a\n2,b,c\n", "line 3 has 3 columns and the header has 2"),
    "csv quotes": (
        "a.csv",
        'id,text\n1,a\n2,"b\n3,c\n4,d\n',
        "line 3 is not valid CSV: a quote opens in the record that",
    ),
    "csv quotes that close late": (
        "a.csv",
        'id,text\n1,"a\n2,b" c\n',
        "line 2 is not valid CSV: ',' expected after '\"', in a",
    ),
    "csv quotes in the header": ("a.csv", 'id,"text\n1,a\n', "line 1 is not valid CSV: a quote opens"),
    "csv columns over lines": ("a.csv", 'id,text\n1,"a\nb",c\n', "line 2 has 3 columns"),
    "cut list": ("a.json", '[{"text": "a"}, {"text": "b', "may have been cut short in item 2"),
    "cut between items": ("a.json", '[{"text": "a"},\n', "the file ends before the list does"),
    "cut at a comma": ("a.json", '["a"', "the file ends before the list does"),
    "cut line": (
        "a.jsonl",
        '{"text": "a"}\n{"text": "b',
        "line 2 is not valid JSON (Unterminated string starting at: ",
    ),
    "list in an object": (
        "a.json",
        '{"data": [{"text": "a"}]}',
        "of an object that holds a list, write that list alone into a file",
    ),
    "object over lines": ("a.json", '{\n"text": "a"\n}', "or has each record in a line of its own"),
    "other delimiter": ("a.csv", "id;text\n1;a\n2;b;c\n", "line 3 has 3 columns and the header has 2 (divided by ';')"),
    "no header": ("a.csv", "Once upon a time,0\nTwice,1\n", "has no such line, put one there, such as `text`"),
    "column twice": ("a.csv", "text,id,text\na,1,b\n", "has the column 'text' more than once"),
    "a word to Excel": ("a.csv", "sep=;\nid;text\n1;a\n", "line 1 is `sep=`, a word to Excel and no header. Remove"),
    "no line at first": ("a.csv", "\ntext\na\n", "there is no field 'text'; the fields are none"),
    "preferences": ("a.jsonl", '{"prompt": "a", "chosen": "b", "rejected": "c"}', "These are preferences (`chosen`"),
    "spans": ("a.jsonl", '{"content": "a", "entities": [[0, 1, "X"]]}', "Spans of characters, as doccano"),
    "carriage returns": ("a.csv", "text\ra\rb\r", "its lines end in carriage returns alone"),
    "deep": ("a.jsonl", '{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    "deep list": ("a.json", "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    "long number": ("a.json", "[" + "9" * 5000 + "]", "Exceeds the limit"),
    "parquet": ("a.parquet", "no parquet", "is not a readable Parquet file"),
}


RECORDS = b'{"text": "one"}\n{"text": "two"}\n'


def archive(kind: str) -> bytes:
    made = io.BytesIO()
    if kind in ("zip", "xlsx"):
        with zipfile.ZipFile(made, "w") as file:
            file.writestr("a.jsonl" if kind == "zip" else "docProps/app.xml", RECORDS)
    elif kind == "tar":
        with tarfile.open(fileobj=made, mode="w") as tar:
            tar.addfile(tarfile.TarInfo("a.jsonl"), io.BytesIO())
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["one"]}), made)
    else:
        table = pyarrow.table({"text": ["one"]})
        new = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with new(made, table.schema) as writer:
            writer.write_table(table)
    return made.getvalue()


def database() -> bytes:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("create table texts (text)")
        connection.commit()
        return connection.serialize()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
STRANGE: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "gzip": (lambda: gzip.compress(RECORDS), "gzip-compressed", "gunzip"),
    "zstd": (lambda: pyarrow.compress(RECORDS, "zstd", asbytes=True), "zstd-compressed", "zstd -d"),
    "bzip2": (lambda: bz2.compress(RECORDS), "bzip2-compressed", "bunzip2"),
    "xz": (lambda: lzma.compress(RECORDS), "xz-compressed", "unxz"),
    "zip": (lambda: archive("zip"), "a zip archive", "unzip"),
    "tar": (lambda: archive("tar"), "a tar archive", "tar -xf"),
    "parquet": (lambda: archive("parquet"), "a Parquet file", "ends in .parquet"),
    "arrow": (lambda: archive("arrow"), "an Arrow file", "save_to_disk"),
    "arrow stream": (lambda: archive("stream"), "an Arrow file", "save_to_disk"),
    "sqlite": (database, "an SQLite database", "text file"),
    "pickle": (lambda: pickle.dumps([{"text": "one"}]), "a Python pickle", "can run code"),
    "git-lfs": (lambda: POINTER, "a Git LFS pointer", "git lfs pull"),
    "html": (lambda: b"\n<!DOCTYPE html>\n<html>Log in</html>", "an HTML page", "download it again"),
    "excel": (lambda: archive("xlsx"), "a document of Excel", "as CSV in UTF-8"),
    "old excel": (lambda: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "a document of Excel", "as CSV in UTF-8"),
    "utf-16": (lambda: RECORDS.decode().encode("utf-16"), "text in UTF-16", "iconv -f UTF-16 -t UTF-8"),
    "utf-16-le": (lambda: RECORDS.decode().encode("utf-16-le"), "text in UTF-16", "iconv -f UTF-16LE"),
    "utf-16-be": (lambda: RECORDS.decode().encode("utf-16-be"), "text in UTF-16", "iconv -f UTF-16BE"),
    "utf-32": (lambda: RECORDS.decode().encode("utf-32"), "text in UTF-32", "iconv -f UTF-32"),
}


@pytest.mark.parametrize("kind", STRANGE)
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt", ".parquet", ".gz", ".arrow", ""])
def test_what_a_file_holds_counts_and_not_its_name(tmp_path: Path, kind: str, suffix: str) -> None:
    made, name, advice = STRANGE[kind]
    path = write(tmp_path / f"data{suffix}", made())
    if (kind, suffix) in (("parquet", ".parquet"), ("html", ".txt")):
        assert len(list(read_file(path, TEXT_ONLY))) == 1
        return
    said = message(path)
    assert f"{path} is {name}" in said
    assert advice in said


@pytest.mark.parametrize("suffix", [".parquet", ".gz", ".zst", ".bz2", ".xz", ".zip"])
def test_a_text_that_its_name_calls_something_else(tmp_path: Path, suffix: str) -> None:
    said = message(write(tmp_path / f"data.jsonl{suffix}", RECORDS))
    assert "it holds text. Give it a name that says what it is" in said


@pytest.mark.parametrize(
    "text",
    [
        "BZh is how it begins",
        "PAR1 and PAR2",
        "ORC\nand elf",
        "GGUF, a format",
        "ARROW1 é",
        "%PDF",
        "a\0b",
        "",
        "\ufeffa",
    ],
)
def test_a_text_is_a_text_however_it_begins(tmp_path: Path, text: str) -> None:
    file = write(tmp_path / "a.txt", text)
    found = [document.text for document in read_file(file, TEXT_ONLY)]
    assert found == ([text.removeprefix("\ufeff")] if text else [])
    long = "PAR1 " + "é" * 1000  # the first bytes that are looked at end within a character
    assert [d.text for d in read_file(write(tmp_path / "b.txt", long), TEXT_ONLY)] == [long]


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_say_where(tmp_path: Path, case: str) -> None:
    name, content, expected = BROKEN[case]
    assert expected in message(write(tmp_path / name, content))


def test_no_hint_where_it_would_mislead(tmp_path: Path) -> None:
    assert "cut short" not in message(write(tmp_path / "a.json", '[{"text": x}]'))
    assert "cut short" not in message(write(tmp_path / "a.jsonl", '{"text": x}'))
    assert "cut short" not in message(write(tmp_path / "a.jsonl", '{"text": "x\n{"text": "y"}\n'))
    lines = '{"text": "a", "tags": ["b"]}\n{"text": \n'
    assert "that list alone" not in message(write(tmp_path / "a.json", lines))


def test_parquet_of_text_that_is_none(tmp_path: Path) -> None:
    column = pyarrow.array([b"\xff"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    assert "is not a readable Parquet file" in message(tmp_path / "a.parquet")


WHOLE_FILES = {
    ".txt": b"one\n<|endoftext|>\ntwo\n",
    ".jsonl": b'{"text": "a", "n": [1, {"b": null}]}\n{"text": "\xc3\xa9"}\n',
    ".json": b'[{"text": "a", "n": [1, {"b": null}]}, {"text": "\xc3\xa9"}]',
    ".csv": b'text,label\n"a, b",1\n"c ""d""",2\n',
}


@settings(max_examples=80, deadline=None)
@given(
    suffix=st.sampled_from(list(WHOLE_FILES)),
    place=st.integers(0, 60),
    removed=st.integers(0, 20),
    put=st.binary(max_size=4)
    | st.sampled_from([b"\xef\xbb\xbf", b"\r\n", b"\r", b"\0", b'"', b"[" * 2000, b"\\ud800"]),
    as_chat=st.booleans(),
)
def test_damage_anywhere_is_an_error_of_the_users(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, place: int, removed: int, put: bytes, as_chat: bool
) -> None:
    whole = WHOLE_FILES[suffix]
    path = write(tmp_path_factory.mktemp("odd") / f"a{suffix}", whole[:place] + put + whole[place + removed :])
    form = RecordForm("auto", {}, {}, "text", strip=True, tolerance=Tolerance(lenient=False)) if as_chat else None
    corpus = open_source(Source(path=str(path)), form=form)
    with contextlib.suppress(DataError):
        list(choose_texts(corpus, Rules(strip=True, lowercase=False, held_out=0.0)))


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("keys", "kind", "record"),
    [
        ({}, None, {"text": f"a {HALF}"}),
        ({}, classes.KIND, {"text": "a", "label": f"b {HALF}"}),
        ({"pair_field": "pair"}, classes.KIND, {"text": "a", "pair": HALF, "label": "b"}),
        ({"text_field": "words"}, tags.KIND, {"words": ["a", HALF], "label": ["O", "O"]}),
        ({"text_field": "words"}, tags.KIND, {"words": ["a", "b"], "label": ["O", HALF]}),
        ({}, "form", {"question": f"a {HALF}", "answer": "b"}),
        ({}, "form", {"question": "a", "answer": "b", "tools": [{"name": HALF}]}),
    ],
)
def test_half_a_character_is_refused_in_every_text(
    tmp_path: Path, keys: dict[str, Any], kind: Any, record: dict[str, Any]
) -> None:
    form = RecordForm("auto", {}, {}, "text", strip=True, tolerance=Tolerance(lenient=True)) if kind == "form" else None
    for name in ("a.jsonl", "a.json"):
        line = json.dumps(record)
        path = write(tmp_path / name, f"[{line}]" if name == "a.json" else line)
        source = Source(path=str(path), **keys)
        fields = kind.fields(source) if isinstance(kind, RowKind) else None
        with pytest.raises(DataError, match=r"(line|item) 1: the (text|field '(pair|label)') holds half a character"):
            list(open_source(source, fields, form=form).documents())


def test_labels_that_are_no_classes(tmp_path: Path) -> None:
    labelled = Fields("text", "label")
    path = write(tmp_path / "a.jsonl", '{"text": "a", "label": 0.5}\n')
    assert "the label in 'label' is a number; a class is an integer or a text" in message(path, labelled)
    path = write(tmp_path / "a.jsonl", '{"text": "a"}\n')
    assert "there is no field 'label'" in message(path, labelled)
    assert "has no labels" in message(write(tmp_path / "a.txt", "a"), labelled)

"""A kind of rows that is no part of the package: one object, and nothing else knows of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import DataSection
from finetune.data.prepare import prepare_data
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds.row_kind import Arrays, Numbers, RowKind, Shown, TokenRows, pad
from finetune.data.show_examples import examples
from finetune.data.sources.readers import Document, Fields
from finetune.data.tokenization.encoded import Encoded
from finetune.data.tokenization.tokenizer import Encoder
from finetune.utils.errors import DataError


def read(record: Mapping[str, Any], fields: Fields, where: str) -> Document:
    if record["chosen"] == record["rejected"]:
        raise DataError(f"{where}: both answers are the same.")
    texts = [record[name] for name in (fields.text, "chosen", "rejected")]
    return Document(json.dumps(texts), where, (float(record[str(fields.label)]),))


def encode(encoder: Encoder, texts: list[str]) -> Encoded:
    found = encoder.encode_texts([part for text in texts for part in json.loads(text)])
    prompts, chosen, rejected = found.lengths.reshape(-1, 3).T
    return Encoded(prompts + chosen + rejected, found.numbers, {"prompts": prompts, "chosen": chosen})


def pack(columns: Mapping[str, Any], data: DataSection, room: Sequence[int]) -> packed_rows.PackedRows:
    return packed_rows.pad_documents(columns["offsets"], data.sequence_length, "drop", with_targets=False)


def batch(rows: TokenRows, numbers: Numbers) -> Arrays:
    """Prompt and answer, the chosen ones first: (2 B, L); and `margins`, (B,)."""
    sides: tuple[list[list[int]], list[list[int]]] = ([], [])
    for row in numbers.tolist():
        start, length = int(rows.packed.starts[row]), int(rows.packed.lengths[row])
        ids = rows.tokens[start : start + length].tolist()
        prompt, answer = int(rows.columns["prompts"][row]), int(rows.columns["chosen"][row])
        sides[0].append(ids[: prompt + answer])
        sides[1].append(ids[:prompt] + ids[prompt + answer :])
    return {"input_ids": pad([*sides[0], *sides[1]], rows.padding_id, rows.row_length), "margins": rows.values[numbers]}


def shown(rows: TokenRows, row: int, names: Sequence[str]) -> Iterator[Shown]:
    chosen, rejected = batch(rows, np.array([row]))["input_ids"]
    yield Shown(chosen, np.isin(chosen, rejected, invert=True))


ANSWERS = RowKind(
    labels="number",
    read=read,
    key=("answers",),
    of_documents={"labels": "int64", "prompts": "int64", "chosen": "uint32"},
    encode=encode,
    pack=pack,
    values=lambda columns, labels, classes: np.array(labels, np.float32)[columns["labels"]],
    targets=lambda rows: np.ones(len(rows), np.int64),
    batch=batch,
    examples=shown,
)
RECORDS = [
    {"prompt": f"How many are {n}?", "chosen": f"They are {n}.", "rejected": "No idea at all.", "margin": n / 8}
    for n in range(40)
]


def prepared(folder: Path, records: list[dict[str, Any]]) -> Any:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    source = {"path": str(folder / "pairs.jsonl"), "text_field": "prompt", "label_field": "margin", "weight": 2.0}
    data = {"train": [source], "packing": "padded", "cache_dir": str(folder / "cache"), "validation_fraction": 0.2}
    tree = {"model": {"config": {"model_type": "llama"}}, "tokenizer": {"vocab_size": 320}, "data": data}
    return prepare_data(validate_recipe({**tree, "length": {"steps": 0}}), ANSWERS, quiet=True)


def test_a_kind_of_ones_own_is_stored_and_batched(tmp_path: Path) -> None:
    """Its columns too, for the copies by weight and for what is held out, and read from the cache as they were made."""
    first, data = prepared(tmp_path, RECORDS), prepared(tmp_path, RECORDS)
    assert (first.report.reused, data.report.reused) == (False, True)
    decode, found = data.tokenizer.decode, list[tuple[str, str, float]]()
    for rows, copies in ((data.train, 2), (data.validation, 1)):
        numbers = np.arange(len(rows))
        read_back = rows.batch(numbers)
        chosen, rejected = read_back["input_ids"].split(len(rows))
        texts = [[decode(ids, skip_special_tokens=True) for ids in side] for side in (chosen, rejected)]
        found += list(zip(*texts, read_back["margins"].tolist(), strict=True)) * (2 // copies)
        assert rows.num_targets(numbers) == len(rows)
    expected = [(r["prompt"] + r["chosen"], r["prompt"] + r["rejected"], r["margin"]) for r in RECORDS] * 2
    assert sorted(found) == sorted(expected)
    line = next(examples(data.train, data.tokenizer, (), 1, coloured=False))
    assert "learned tokens are in [brackets]" in line.plain


def test_a_kind_of_ones_own_refuses_records(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"pairs.jsonl, line 2: both answers are the same"):
        prepared(tmp_path, [RECORDS[0], {**RECORDS[1], "rejected": RECORDS[1]["chosen"]}])

"""Classes, numbers or texts that an opened model gives for documents."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from finetune.config.recipe_schema import Recipe
from finetune.data.progress_bar import documents_bar
from finetune.data.rows import packed_rows
from finetune.data.rows.packed_rows import TokenRows
from finetune.data.sources.corpus import Chosen, Rules, choose_texts, open_source
from finetune.data.tokenization import tokenizer
from finetune.data.tokenization.tokenizer import Encoded, Encoder, batch_documents
from finetune.export.load_model import LoadedModel
from finetune.models import lora_adapters, prompts
from finetune.utils.to_device import batch_to_device


class Prediction(NamedTuple):
    """The class of a document, its number, or the text that is written for it; without tokens it has none."""

    label: str | float | None
    probabilities: list[float]
    """(C,), in the order of the classes; empty for a number or text, and where the document has no text."""


def predict_files(
    opened: LoadedModel, recipe: Recipe, micro_size: int = 32, max_new_tokens: int = 200
) -> Iterator[Prediction]:
    """Yields the class, number or text of each document of the recipe's validation sources, in their order.

    Texts become rows as an evaluation makes them, so that the classes are those that it counts.

    Args:
        recipe: See `evaluate_files.recipe_of`.
        micro_size: Documents in a forward pass; it does not change the result.
        max_new_tokens: The most tokens of a text that is written.

    Raises:
        DataError: If a source cannot be read.
    """
    opened.require_predictions()
    data, writes = recipe.data, opened.task.paired
    names = () if writes else opened.class_names
    # A target is what is asked for.
    sources = [source.model_copy(update={"pair_field": None}) if writes else source for source in data.validation]
    corpora = [open_source(source, labelled=False) for source in sources]
    rules = Rules(data.strip, data.lowercase, 0.0, False)
    pairs = any(source.pair_field is not None for source in sources)
    encoder = Encoder(opened.tokenizer, num_workers=data.num_workers, pairs=pairs)
    wrapping = (tokenizer.pairing_of if pairs else tokenizer.wrapping_of)(opened.tokenizer)
    with documents_bar("predicting", [corpus.size for corpus in corpora], quiet=False) as bar:
        before = empty = 0
        for corpus in corpora:
            batch: Sequence[Chosen]
            for batch, encoded in encoder.encode_all(batch_documents(choose_texts(corpus, rules))):
                rows = _rows(encoded, recipe, wrapping, tokenizer.padding_id(opened.tokenizer))
                found = iter(
                    _texts(opened, rows, micro_size, max_new_tokens) if writes else _scores(opened, rows, micro_size)
                )
                for length in encoded.lengths.tolist():
                    scores = next(found) if length else None
                    if scores is None or isinstance(scores, str):
                        yield Prediction(scores, [])
                    elif opened.task.loss_and_numbers is not None:
                        yield Prediction(float(scores), [])
                    else:
                        yield Prediction(names[int(scores.argmax())], scores.softmax(-1).tolist())
                empty += int((encoded.lengths == 0).sum())
                bar.advance(len(batch), before + batch[-1].read)
            before += corpus.size or 0
        if empty:
            bar.say(f"Documents without text, which get nothing: {empty:,}.")


def _rows(encoded: Encoded, recipe: Recipe, wrapping: tokenizer.Wrapping, padding_id: int) -> TokenRows:
    """Rows of those documents that have tokens."""
    lengths, pairs = encoded.lengths.astype(np.int64), None
    if encoded.firsts is not None:
        pairs = np.stack([encoded.firsts, lengths - encoded.firsts], axis=1)[lengths > 0]
    offsets = np.concatenate([np.array([0], np.int64), np.cumsum(lengths)])
    length = recipe.data.sequence_length
    return TokenRows(
        tokens=encoded.numbers,
        packed=packed_rows.pad_documents(offsets, length - wrapping.size, "truncate", with_targets=False),
        row_length=length,
        padding_id=padding_id,
        restarts=False,
        fixed=False,
        wrapping=wrapping,
        pairs=pairs,
        classes=np.zeros(int((lengths > 0).sum()), np.int64),
    )


@torch.no_grad()
def _scores(opened: LoadedModel, rows: TokenRows, micro_size: int) -> torch.Tensor:
    """Scores of the classes, (rows, C), or numbers, (rows, 1); rows of like lengths are computed together."""
    scores = opened.task.scores
    assert scores is not None
    found = torch.zeros(len(rows), len(opened.class_names))
    order = rows.longest() if len(rows) else np.array([], np.int64)
    for start in range(0, len(rows), micro_size):
        share = order[start : start + micro_size]
        batch = batch_to_device(rows.batch(share), opened.device)
        found[share] = opened.scores(batch, scores).cpu()
    return found


@torch.no_grad()
def _texts(opened: LoadedModel, rows: TokenRows, micro_size: int, max_new_tokens: int) -> list[str]:
    """Texts that are written for the rows, as the model's own generation config says."""
    network: Any = lora_adapters.transformer(opened.network)
    found = [""] * len(rows)
    order = rows.longest() if len(rows) else np.array([], np.int64)
    stops = prompts.stop_tokens(network.generation_config, opened.tokenizer, opened.ends)
    room = min(max_new_tokens, opened.longest or max_new_tokens)
    torch.manual_seed(0)  # where it samples
    for start in range(0, len(rows), micro_size):
        share = order[start : start + micro_size]
        batch = batch_to_device(rows.batch(share), opened.device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        written = network.generate(**inputs, max_new_tokens=room, eos_token_id=stops)
        texts = opened.tokenizer.batch_decode(written, skip_special_tokens=True)
        for row, text in zip(share.tolist(), texts, strict=True):
            found[row] = text.strip()
    return found


def json_lines(predictions: Iterable[Prediction], names: Sequence[str] | None, key: str = "number") -> Iterator[str]:
    """Yields a line of JSON for each document.

    Args:
        names: Classes in order of their numbers; None where numbers or texts are predicted.
        key: What these are called.
    """
    for label, shares in predictions:
        found: dict[str, Any]
        if names is None:
            found = {key: None if label is None else _rounded(label)}
        else:
            probabilities = dict(zip(names, map(_rounded, shares), strict=True)) if shares else None
            found = {"label": label, "probabilities": probabilities}
        yield json.dumps(found, ensure_ascii=False) + "\n"


def csv_lines(predictions: Iterable[Prediction], names: Sequence[str] | None, key: str = "number") -> Iterator[str]:
    """Yields a head, and a line of CSV for each document; see `json_lines`."""
    yield _csv_line([key] if names is None else ["label", *(f"probability_{name}" for name in names)])
    for label, shares in predictions:
        if names is None:
            yield _csv_line(["" if label is None else _rounded(label)])
        else:
            yield _csv_line([label, *map(_rounded, shares)] if shares else [""] * (len(names) + 1))


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _rounded(value: Any) -> str | float:
    return value if isinstance(value, str) else float(f"{value:.6g}")

"""Classes, numbers, spans of words or texts that an opened model gives for documents."""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from finetune.config.recipe_schema import Recipe
from finetune.data.progress_bar import documents_bar, rows_bar
from finetune.data.rows import packed_rows
from finetune.data.rows.packed_rows import TokenRows
from finetune.data.sources.corpus import Chosen, Rules, choose_texts, open_source
from finetune.data.tokenization import tokenizer
from finetune.data.tokenization.tokenizer import Encoded, Encoder, batch_documents
from finetune.export.generate_text import generate_tokens
from finetune.export.load_model import LoadedModel
from finetune.export.sampling_options import SamplingOptions
from finetune.models import lora_adapters, prompts
from finetune.tasks import prompt_set
from finetune.tasks.tag_spans import TagScheme, list_spans
from finetune.utils.errors import DataError
from finetune.utils.to_device import batch_to_device

Prediction = tuple[Mapping[str, Any], dict[str, Any]]
"""A record, and what is predicted for it."""

# Prompts of which those of one length are computed together.
_AT_A_TIME = 512


class SpanPrediction(NamedTuple):
    """Some words of a document that are a name or a phrase, or one that has a part of speech."""

    text: str
    """The words, with a space between them."""
    tag: str
    start: int
    """Number of its first word in the document, from 0."""
    end: int
    """One more than that of its last."""
    probability: float
    """Mean, over its words, of the probability of the class that a word is taken for."""


def predict_files(
    opened: LoadedModel, recipe: Recipe, micro_size: int = 32, max_new_tokens: int = 200
) -> Iterator[Prediction]:
    """Yields the records of the recipe's validation sources, in their order, and what is predicted for each.

    That is a `prediction`, None where there is no text: the class, with `probabilities` of all classes; the number; or
    the text that is written, which of a language model answers or continues a prompt. Where words are tagged it is
    `spans`, a list of `SpanPrediction`.

    Texts become rows as an evaluation makes them, so that the classes are those that it counts.

    Args:
        recipe: See `evaluate_files.recipe_of`.
        micro_size: Documents in a forward pass; it does not change the result.
        max_new_tokens: The most tokens of a text that is written.

    Raises:
        DataError: If a source cannot be read.
    """
    opened.require_predictions()
    if opened.writes_text:
        yield from _answers(opened, recipe, micro_size, max_new_tokens)
        return
    data, writes, learned = recipe.data, opened.task.paired, opened.task.learned
    names = () if writes else opened.class_names
    # A target is what is asked for.
    sources = [source.model_copy(update={"pair_field": None}) if writes else source for source in data.validation]
    corpora = [open_source(source, learned, labels=False, keep=True) for source in sources]
    rules = Rules(data.strip, data.lowercase, 0.0)
    pairs = any(source.pair_field is not None for source in sources)
    encoder = Encoder(opened.tokenizer, learned, num_workers=data.num_workers, pairs=pairs)
    wrapping = tokenizer.wrapping_of(opened.tokenizer, pair=pairs)
    with documents_bar("predicting", [corpus.size for corpus in corpora], quiet=False) as bar:
        before = empty = untagged = 0
        for corpus in corpora:
            batch: Sequence[Chosen]
            for batch, encoded in encoder.encode_all(batch_documents(choose_texts(corpus, rules))):
                rows = _rows(encoded, recipe, wrapping, tokenizer.padding_id(opened.tokenizer))
                outputs: Iterator[Any] = iter(
                    _texts(opened, rows, micro_size, max_new_tokens) if writes else _scores(opened, rows, micro_size)
                )
                starts = np.cumsum(encoded.lengths) - encoded.lengths
                for item, length, start in zip(batch, encoded.lengths.tolist(), starts.tolist(), strict=True):
                    scores: Any = next(outputs) if length else None
                    record = item.record or {}
                    if encoded.words is not None:
                        words = json.loads(item.text) if item.text else []
                        begun = encoded.words[start : start + length]
                        places = begun[begun >= 0][: 0 if scores is None else len(scores)].tolist()
                        untagged += len(words) - len(places)
                        yield record, {"spans": _spans(words, places, scores, names) if scores is not None else []}
                    elif writes:
                        yield record, {"prediction": scores}
                    elif opened.task.numbers:
                        yield record, {"prediction": None if scores is None else _rounded(scores)}
                    else:
                        shares = None
                        if scores is not None:
                            shares = dict(zip(names, map(_rounded, scores.softmax(-1).tolist()), strict=True))
                        label = names[int(scores.argmax())] if scores is not None else None
                        yield record, {"prediction": label, "probabilities": shares}
                empty += int((encoded.lengths == 0).sum())
                bar.advance(len(batch), before + batch[-1].read)
            before += corpus.size or 0
        if untagged:
            bar.say(f"Words that get no tag, since they lie behind the end of a row or have no token: {untagged:,}.")
        if empty:
            bar.say(f"Documents without text, which get nothing: {empty:,}.")


def _rows(encoded: Encoded, recipe: Recipe, wrapping: tokenizer.Wrapping, padding_id: int) -> TokenRows:
    """Rows of those documents that have tokens."""
    lengths, pairs = encoded.lengths.astype(np.int64), None
    if encoded.firsts is not None:
        pairs = np.stack([encoded.firsts, lengths - encoded.firsts], axis=1)[lengths > 0]
    offsets = np.concatenate([np.array([0], np.int64), np.cumsum(lengths)])
    length, words = recipe.data.sequence_length, encoded.words
    return TokenRows(
        tokens=encoded.numbers,
        packed=packed_rows.pad_documents(offsets, length - wrapping.size, "truncate", with_targets=False),
        row_length=length,
        padding_id=padding_id,
        restarts=False,
        fixed=False,
        wrapping=wrapping,
        pairs=pairs,
        classes=np.zeros(int((lengths > 0).sum()), np.int64) if words is None else None,
        # All words are of one class: that they have one says where they begin.
        token_labels=np.minimum(words, 0) if words is not None else None,
        label_classes=np.array([0, packed_rows.IGNORED]) if words is not None else None,
    )


@torch.no_grad()
def _scores(opened: LoadedModel, rows: TokenRows, micro_size: int) -> list[torch.Tensor]:
    """Scores of the classes of each row, (C,), or of each of its words, (words, C), or its number, (1,).

    Rows of like lengths are computed together.
    """
    scores = opened.task.scores
    assert scores is not None
    row_scores = [torch.empty(0)] * len(rows)
    order = rows.longest() if len(rows) else np.array([], np.int64)
    for start in range(0, len(rows), micro_size):
        share = order[start : start + micro_size]
        batch = rows.batch(share)
        given = opened.scores(batch_to_device(batch, opened.device), scores).cpu()
        for index, row in enumerate(share.tolist()):
            of_words = batch["targets"][index] != packed_rows.IGNORED
            row_scores[row] = given[index][of_words] if opened.task.tagged else given[index]
    return row_scores


def _spans(words: list[str], places: list[int], scores: torch.Tensor, names: Sequence[str]) -> list[SpanPrediction]:
    """The spans of a document.

    Args:
        places: Numbers of the words that have scores.
        scores: Of the classes, (places, C).
    """
    likely, classes = scores.softmax(-1).max(-1)
    spans = []
    for first, end, tag in list_spans(classes.tolist(), TagScheme.of(names)):
        start, behind = places[first], places[end - 1] + 1
        text = " ".join(words[start:behind])
        spans.append(SpanPrediction(text, tag, start, behind, float(likely[first:end].mean())))
    return spans


@torch.no_grad()
def _texts(opened: LoadedModel, rows: TokenRows, micro_size: int, max_new_tokens: int) -> list[str]:
    """Texts that are written for the rows, as the model's own generation config says."""
    network: Any = lora_adapters.transformer(opened.network)
    row_texts = [""] * len(rows)
    order = rows.longest() if len(rows) else np.array([], np.int64)
    stops = prompts.stop_tokens(network.generation_config, opened.tokenizer, opened.ends) or None
    room, begin = min(max_new_tokens, opened.longest or max_new_tokens), prompts.decoder_start(network)
    torch.manual_seed(0)  # where it samples
    for start in range(0, len(rows), micro_size):
        share = order[start : start + micro_size]
        batch = batch_to_device(rows.batch(share), opened.device)
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        written = network.generate(**inputs, max_new_tokens=room, eos_token_id=stops, decoder_start_token_id=begin)
        texts = opened.tokenizer.batch_decode(written, skip_special_tokens=True)
        for row, text in zip(share.tolist(), texts, strict=True):
            row_texts[row] = text.strip()
    return row_texts


def _answers(opened: LoadedModel, recipe: Recipe, micro_size: int, max_new_tokens: int) -> Iterator[Prediction]:
    """Texts that a language model writes behind prompts, always the likeliest token; those of one length together."""
    asked, longest = [*prompt_set.read_questions(recipe, opened.tokenizer)], opened.longest
    for _, ids, where in asked:
        if longest is not None and len(ids) >= longest:
            raise DataError(
                f"{where}: the prompt has {len(ids)} tokens, and the model knows {longest} positions: there is no room "
                "for an answer. Shorten or remove the record."
            )
    decode = partial(opened.tokenizer.decode, skip_special_tokens=True)
    with rows_bar("answering", len(asked)) as advance:
        for start in range(0, len(asked), _AT_A_TIME):
            texts: dict[int, str] = {}
            part = sorted(enumerate(asked[start : start + _AT_A_TIME]), key=lambda item: len(item[1][1]))
            for length, alike in groupby(part, lambda item: len(item[1][1])):
                room = max_new_tokens if longest is None else min(max_new_tokens, longest - length)
                while length and (share := {number: ids for number, (_, ids, _) in islice(alike, micro_size)}):
                    written = generate_tokens(opened, [*share.values()], SamplingOptions(room))
                    for (number, ids), new in zip(share.items(), written, strict=True):
                        # Decoded behind its prompt: alone, the first word of some tokenizers loses its space.
                        texts[number] = decode([*ids, *new])[len(decode(ids)) :].strip()
                    advance(len(share))
            for number, (record, *_) in enumerate(asked[start : start + _AT_A_TIME]):
                yield record, {"prediction": texts.get(number)}


def json_lines(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Yields a line of JSON for each document: its record, and what is predicted for it."""
    for record, predicted in predictions:
        if "spans" in predicted:
            spans = [{**span._asdict(), "probability": _rounded(span.probability)} for span in predicted["spans"]]
            predicted = {"spans": spans}
        yield json.dumps(_joined(record, predicted), ensure_ascii=False, default=str) + "\n"


def csv_lines(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Yields a head with all columns that there are, and a line of CSV for each document; see `json_lines`."""
    rows = []
    for record, predicted in predictions:
        shares = predicted.pop("probabilities", None) or {}
        rows.append(_joined(record, predicted | {f"probability_{name}": share for name, share in shares.items()}))
    columns = [*dict.fromkeys(column for row in rows for column in row)]
    yield _csv_line(columns)
    for row in rows:
        cells = (row.get(column) for column in columns)
        yield _csv_line(
            [
                "" if c is None else json.dumps(c, ensure_ascii=False, default=str) if isinstance(c, list | dict) else c
                for c in cells
            ]
        )


def _joined(record: Mapping[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record and of what is predicted for it.

    Raises:
        DataError: If both have a field.
    """
    if twice := record.keys() & predicted.keys():
        raise DataError(
            f"The file has a field '{min(twice)}', as what is predicted has, and both are written. Name it otherwise."
        )
    return {**record, **predicted}


def span_csv_lines(predictions: Iterable[Prediction]) -> Iterator[str]:
    """Yields a head, and a line of CSV for each span, behind the number of its document, from 0."""
    yield _csv_line(["document", *SpanPrediction.__annotations__])
    for number, (_, predicted) in enumerate(predictions):
        for span in predicted["spans"]:
            yield _csv_line([number, *span[:-1], _rounded(span.probability)])


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _rounded(value: Any) -> float:
    return float(f"{float(value):.6g}")

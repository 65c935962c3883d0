"""Classes, numbers, spans of words or texts that an opened model gives for documents."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import torch

from finetune.config.recipe_schema import Recipe
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.chat.chat_templates import find_template
from finetune.data.progress_bar import documents_bar, rows_bar
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds import classes, numbers
from finetune.data.rows.kinds.row_kind import RowKind, TokenRows
from finetune.data.sources.conversation_formats import RecordForm
from finetune.data.sources.corpus import Chosen, Rules, choose_texts, open_source
from finetune.data.tokenization.encoded import Encoded
from finetune.data.tokenization.special_tokens import Wrapping, padding_id
from finetune.data.tokenization.tokenizer import Encoder, batch_documents
from finetune.export.generate_text import generate_tokens
from finetune.export.load_model import LoadedModel
from finetune.export.sampling_options import SamplingOptions
from finetune.models import lora_adapters, prompts
from finetune.tasks import prompt_set
from finetune.tasks.tag_spans import TagScheme, list_spans
from finetune.tasks.task import Batch
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
    `spans`, a list of `SpanPrediction`; where texts are embedded, `embedding`, a list of numbers.

    Texts become rows as an evaluation makes them, so that the classes are those that it counts. A reward model's run
    scores a text that holds prompt and answer, or with a `chat` section a conversation.

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
    data, writes, embeds, chat = recipe.data, opened.task.rows.reads_source, opened.task.rows.embeds, None
    # A target is what is asked for; and a text is embedded alone.
    kind = classes.KIND if writes or embeds else opened.task.rows
    if kind.judged:
        kind, chat = _as_trained(opened, recipe), recipe.chat
    names = () if writes else opened.class_names
    sources = [source.model_copy(update={"pair_field": None}) if writes else source for source in data.validation]
    forms = [RecordForm(s.format, roles=chat.roles, text_field=s.text_field) if chat else None for s in sources]
    read = [
        kind.fields(source, labels=False, keep=True, form=form) for source, form in zip(sources, forms, strict=True)
    ]
    corpora = [open_source(*source) for source in zip(sources, read, strict=True)]
    as_written = opened.task.rows.judged
    rules = Rules(data.strip and not as_written, data.lowercase and not as_written, 0.0)
    paired = any(source.pair_field is not None for source in sources)
    encoder: Any = Encoder(opened.tokenizer, kind.encode, num_workers=data.num_workers, paired=paired)
    if chat is not None:
        template = find_template(opened.tokenizer, None, chat.template_args)
        encoder = ChatEncoder(opened.tokenizer, template, chat, row_length=data.sequence_length - 1)
    around = kind.around(opened.tokenizer, paired)
    compute = _writer(opened, max_new_tokens) if writes else partial(_scores, opened)
    with documents_bar("predicting", [corpus.size for corpus in corpora], quiet=False) as bar:
        before = empty = untagged = 0
        for corpus in corpora:
            batch: Sequence[Chosen]
            for batch, encoded in encoder.encode_all(batch_documents(choose_texts(corpus, rules))):
                rows = _rows(kind, encoded, recipe, around, padding_id(opened.tokenizer))
                torch.manual_seed(0)  # where it samples
                outputs = iter(_outputs(rows, micro_size, opened.device, compute))
                starts = np.cumsum(encoded.lengths) - encoded.lengths
                for item, length, start in zip(batch, encoded.lengths.tolist(), starts.tolist(), strict=True):
                    scores = next(outputs) if length else None
                    record = item.document.record or {}
                    if encoded.words is not None:
                        words = json.loads(item.text) if item.text else []
                        begun = encoded.words[start : start + length]
                        places = begun[begun >= 0][: 0 if scores is None else len(scores)].tolist()
                        untagged += len(words) - len(places)
                        yield record, {"spans": _spans(words, places, scores, names) if scores is not None else []}
                    elif writes:
                        yield record, {"prediction": scores}
                    elif embeds:
                        yield record, {"embedding": None if scores is None else [*map(_rounded, scores.tolist())]}
                    elif kind.labels == "number":
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


def _as_trained(opened: LoadedModel, recipe: Recipe) -> RowKind:
    """The kind of an answer with its prompt, with the tokens around it that a reward model has learned to score."""
    data, tokenizer = recipe.data, opened.tokenizer
    ends = ((data.add_bos, tokenizer.bos_token_id), (data.add_eos, tokenizer.eos_token_id))
    # A template writes what goes around a conversation.
    tokens = [(end,) if added and end is not None and recipe.chat is None else () for added, end in ends]
    return replace(numbers.KIND, around=lambda tokenizer, paired: (Wrapping(*tokens),))


def _rows(kind: RowKind, encoded: Encoded, recipe: Recipe, around: tuple[Wrapping, ...], padding_id: int) -> TokenRows:
    """Rows of those documents that have tokens."""
    there = encoded.lengths > 0
    columns = {name: values[there] for name, values in encoded.columns.items() if name in kind.of_documents}
    columns["offsets"] = np.append(np.int64(0), np.cumsum(encoded.lengths[there], dtype=np.int64))
    values = np.zeros(int(there.sum()), np.int64)
    if encoded.words is not None:
        # All words are of one class: that they have one says where they begin.
        columns["token_labels"], values = np.minimum(encoded.words, 0), np.array([0, packed_rows.IGNORED])
    rooms = [recipe.data.sequence_length - of_text.size for of_text in around]
    return TokenRows(
        kind=kind,
        tokens=encoded.numbers,
        packed=kind.pack(columns, recipe.data, rooms),
        columns=columns,
        row_length=recipe.data.sequence_length,
        padding_id=padding_id,
        around=around,
        values=values,
    )


@torch.no_grad()
def _outputs(
    rows: TokenRows, micro_size: int, device: torch.device, compute: Callable[[Batch], Iterable[Any]]
) -> list[Any]:
    """What is computed of each row; rows of like lengths are computed together."""
    outputs, order = [None] * len(rows), rows.longest()
    for start in range(0, len(rows), micro_size):
        share = order[start : start + micro_size]
        batch = batch_to_device(rows.batch(share), device)
        for row, output in zip(share.tolist(), compute(batch), strict=True):
            outputs[row] = output
    return outputs


def _scores(opened: LoadedModel, batch: Batch) -> Iterable[torch.Tensor]:
    """Scores of the classes of each row, (C,), or of each of its words, (words, C), or its number, (1,)."""
    assert opened.task.scores is not None
    scores = opened.scores(batch, opened.task.scores).cpu()
    if opened.task.rows.labels != "tag":
        return scores
    begun = (batch["targets"] != packed_rows.IGNORED).cpu()
    return [of_row[words] for of_row, words in zip(scores, begun, strict=True)]


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


def _writer(opened: LoadedModel, max_new_tokens: int) -> Callable[[Batch], Iterable[str]]:
    """Returns what writes texts for a batch, as the model's own generation config says."""
    network: Any = lora_adapters.transformer(opened.network)
    stops = prompts.stop_tokens(network.generation_config, opened.tokenizer, opened.ends) or None
    room, begin = min(max_new_tokens, opened.longest or max_new_tokens), prompts.decoder_start(network)

    def write(batch: Batch) -> Iterable[str]:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        written = network.generate(**inputs, max_new_tokens=room, eos_token_id=stops, decoder_start_token_id=begin)
        return map(str.strip, opened.tokenizer.batch_decode(written, skip_special_tokens=True))

    return write


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

"""A look at data that no recipe describes yet: what its records are, and how long they are in tokens."""

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from finetune.config.recipe_schema import Recipe, Source
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.chat.chat_templates import find_template
from finetune.data.chat.preference_encoder import PreferenceEncoder
from finetune.data.class_labels import KnownClasses
from finetune.data.rows.kinds import answer_pairs, classes, documents
from finetune.data.sources.column_names import guess_chat_fields, guess_field, guess_pair_fields
from finetune.data.sources.conversation_formats import AS_IT_IS, RecordForm, Tolerance, find_format
from finetune.data.sources.corpus import open_source
from finetune.data.sources.preference_formats import LABELS, Preference, PreferenceForm, has_prompt
from finetune.data.tokenization.tokenizer import Encoder, load_tokenizer
from finetune.utils.errors import DataError

Kind = Literal["text", "conversations", "labelled", "pairs"]

_MOST_READ = 20_000
_MOST_TOKENISED = 1_000
# Of columns with a known name: more values than this, and than a tenth of the documents, are no classes.
_MOST_CLASSES = 50
_SOURCE = "data.train.0"
# Records in which columns are looked for whose names say nothing.
_LOOKED_AT = 200
# Names of columns, in small letters, that are no text to learn.
_WRITTEN = {True: "conversations", False: "texts"}
_NO_TEXT = ("id", "url", "source", "date")


class UnknownColumns(DataError):
    """Records whose fields have no names that are known."""

    def __init__(self, text: str, kind: Kind | None, likely: Mapping[str, str]) -> None:
        """
        Args:
            kind: What the records are to be; None if that is not known either.
            likely: Keys of the source that they may have.
        """
        super().__init__(text)
        self.overrides = tuple(f"{_SOURCE}.{key}={name}" for key, name in likely.items())
        keys = {
            "text_field=…": ("text", "labelled"),
            "label_field=… of classes": ("labelled",),
            "fields.user=… and fields.assistant=… of conversations": ("conversations",),
            "fields.prompt=…, fields.chosen=… and fields.rejected=… of pairs": ("pairs",),
        }
        self.keys = ", ".join(f"{_SOURCE}.{key}" for key, of in keys.items() if kind is None or kind in of)
        names = {"labelled": "`text` and `label`", "conversations": "`question` and `answer`"}
        names["pairs"] = "`prompt`, `chosen` and `rejected`"
        self.names = names.get(kind or "", "`text`, or `question` and `answer`")
        """Names of columns that are known."""


@dataclass(frozen=True)
class SourceSurvey:
    """Contents of a file, glob or directory."""

    path: str
    kind: Kind
    keys: dict[str, Any]
    """Keys of the recipe's source beside `path`: `text_field`, `label_field`, `fields`."""
    documents: int
    """Documents, or conversations; an estimate where not all were read."""
    whole: bool
    """True if all were read."""
    texts: tuple[str, ...]
    """The first of them, as a run reads them: conversations are JSON."""
    form: str = ""
    """Format of conversations; of pairs `conversations`, or `texts` that hold their prompts."""
    single: bool = False
    """True if pairs are single answers instead, each with a label."""
    labels: dict[int | str, int] = field(default_factory=dict)
    """Documents of each class."""
    places: tuple[tuple[int | str, str], ...] = ()
    """The first label that is a number, and the first that is a text, each with its file and line."""
    classes: KnownClasses | None = None
    """Names that the data itself gives to the classes."""

    @property
    def turns(self) -> bool:
        """True if a chat template writes them."""
        return self.kind == "conversations" or self.form == "conversations"

    def line(self) -> str:
        """Returns a line for people."""
        pairs = "answers with a label" if self.single else "pairs of answers"
        what = {"text": "texts", "labelled": "texts with a class", "pairs": pairs}.get(
            self.kind, f"conversations ({self.form})"
        )
        count = f"{self.documents:,}" if self.whole else f"about {self.documents:,}"
        flat = {**self.keys, **{f"fields.{key}": name for key, name in self.keys.get("fields", {}).items()}}
        keys = ", ".join(f"{key} {name}" for key, name in flat.items() if key != "fields")
        classes = f" of {len(self.labels)}" if self.labels else ""
        return f"{self.path}: {count} {what}{classes}{f', with {keys}' if keys else ''}"


def survey_source(path: str, kind: Kind | None = None, given: Mapping[str, Any] | None = None) -> SourceSurvey:
    """Reads data as a run would, or its first part, and tells what it is by its first record.

    Args:
        path: A file, glob or directory.
        kind: What the records are to be; None to find it.
        given: Keys of the source that need not be found: `text_field`, `label_field`, `fields`, `split`.

    Raises:
        DataError: If it cannot be read as that, or as anything.
    """
    raw = RecordForm(AS_IT_IS, (given or {}).get("fields", {}))
    split = {"split": given["split"]} if given and "split" in given else {}
    first = [*itertools.islice(open_source(Source(path=path, **split), form=raw).documents(), _LOOKED_AT)]
    if not first:
        raise DataError(f"{path} holds no documents. Name a file with some.")
    record_kind, keys = _describe([json.loads(document.text) for document in first], kind, given or {}, first[0].where)
    keys |= split
    fields, source = keys.get("fields", {}), Source(path=path, **keys)
    form: RecordForm | PreferenceForm | None = None
    if record_kind == "conversations":
        form = RecordForm("auto", fields)
    elif record_kind == "pairs":
        record = json.loads(first[0].text)
        chat = not isinstance(record.get(fields.get("chosen", "chosen")), str) or has_prompt(record, fields)
        form = PreferenceForm(RecordForm("auto"), Tolerance(), chat, fields)
    rows = {"labelled": classes.KIND, "pairs": answer_pairs.KIND}.get(record_kind, documents.KIND)
    corpus = open_source(source, rows.fields(source, form=form, source=_SOURCE))
    read = corpus.documents()
    texts: list[str] = []
    labels: Counter[int | str] = Counter()
    places: dict[type, tuple[int | str, str]] = {}
    count = 0
    # Classes are counted, so all labels are read.
    for document in read if record_kind == "labelled" else itertools.islice(read, _MOST_READ):
        count += 1
        if len(texts) < _MOST_TOKENISED:
            texts.append(document.text)
        for label in document.labels:
            if isinstance(label, int | str):
                labels[label] += 1
                places.setdefault(type(label), (label, document.where))
    if kind is None and "label_field" not in (given or {}) and len(labels) > max(_MOST_CLASSES, count // 10):
        return survey_source(path, "text", given)
    whole = record_kind == "labelled" or next(read, None) is None
    if not whole and corpus.size:
        count = max(count, round(count * corpus.size / max(1, corpus.meter.done)))
    names = corpus.fields.classes
    detected = form.detected if isinstance(form, RecordForm) else "" if form is None else _WRITTEN[form.chat]
    return SourceSurvey(
        path=path,
        kind=record_kind,
        keys=keys,
        documents=count,
        whole=whole,
        texts=tuple(texts),
        form=detected,
        single=record_kind == "pairs" and Preference.from_json(texts[0]).label is not None,
        labels=dict(labels),
        places=tuple(places.values()),
        classes=KnownClasses(names, path) if names else None,
    )


def _describe(
    records: Sequence[Mapping[str, Any]], kind: Kind | None, given: Mapping[str, Any], where: str
) -> tuple[Kind, dict[str, Any]]:
    """Tells what the first of some records is, and the keys of its source.

    Raises:
        UnknownColumns: If no meaning is known for its fields.
    """
    record = records[0]
    named = "text_field" in given or "label_field" in given
    if kind == "pairs" or (kind is None and not named and "fields" not in given):
        ranked = "completions" in record and bool({"scores", "ranks"} & record.keys())
        pairs = given.get("fields") or ({} if ranked else guess_pair_fields(record))
        if pairs is None and kind == "pairs" and any(name in record for name in LABELS):
            pairs = {}
        if pairs is not None:
            return "pairs", {"fields": pairs} if pairs else {}
    form, fields = find_format(record), given.get("fields") or guess_chat_fields(record)
    if kind == "conversations" or (kind is None and not named):
        if form not in (None, "text") and "fields" not in given and not ("input" in fields and form != "alpaca"):
            return "conversations", {}
        if fields:
            return "conversations", {"fields": fields}
    label = None if kind == "text" else given.get("label_field") or guess_field(record, "label_field")
    # A single text needs no name that is known.
    texts = [name for name, value in record.items() if isinstance(value, str) and name != label]
    others = [name for name in texts if name.lower() not in _NO_TEXT]
    text = given.get("text_field") or guess_field(texts, "text_field") or (others[0] if len(others) == 1 else None)
    if text is None or (kind == "labelled" and label is None) or kind in ("conversations", "pairs"):
        wanted = {"labelled": "texts with a class", "pairs": "pairs of answers"}.get(kind or "", kind or "text")
        raise UnknownColumns(
            f"{where}: the fields are {', '.join(record) or 'none'}, and by their names these are no {wanted}.",
            kind,
            _likely_columns(records, kind, given, text, label),
        )
    keys = {"text_field": text} if text != "text" else {}
    if label is None:
        return "text", keys
    return "labelled", keys | ({"label_field": label} if label != "label" else {})


def _likely_columns(
    records: Sequence[Mapping[str, Any]],
    kind: Kind | None,
    given: Mapping[str, Any],
    text: str | None,
    label: str | None,
) -> dict[str, str]:
    """Returns the keys of a source that some records may have, but those given; none where there are too few columns.

    Args:
        text: The field that holds the texts, if that is known.
        label: Likewise, for their classes.
    """
    values = {name: [record.get(name) for record in records] for name in records[0] if name.lower() not in _NO_TEXT}
    # Columns whose values repeat.
    classes = [name for name, column in values.items() if 1 < len({*map(str, column)}) <= max(2, len(column) // 5)]
    texts = [name for name, column in values.items() if all(isinstance(value, str) for value in column)]
    texts = [name for name in texts if name != label and (name not in classes or kind in ("conversations", "pairs"))]
    if kind == "pairs":
        named = {f"fields.{key}": name for key, name in zip(("prompt", "chosen", "rejected"), texts, strict=False)}
        return named if len(named) == 3 else {}
    if kind == "labelled" or "label_field" in given or (kind is None and (label or classes) and len(texts) == 1):
        text = text or next(iter(texts), "")
        label = label or next((name for name in [*classes, *values] if name != text), "")
        likely = {"text_field": text, "label_field": label} if text and label else {}
        return {key: name for key, name in likely.items() if key not in given}
    if len(texts) > 1:
        return {"fields.user": texts[0], "fields.assistant": texts[1]}
    return {"text_field": texts[0]} if texts and kind is None else {}


def token_lengths(survey: SourceSurvey, recipe: Recipe) -> list[int]:
    """Returns the tokens of each of the survey's documents, by the tokenizer and template of a recipe; of pairs those
    of the longer answer with its prompt.

    Raises:
        DataError: If the tokenizer cannot be loaded, or cannot read them.
    """
    tokenizer = load_tokenizer(recipe)
    most = 1 << 30
    chat: ChatEncoder | None = None
    if recipe.chat is not None:
        template = find_template(tokenizer, recipe.chat.template, recipe.chat.template_args)
        chat = ChatEncoder(tokenizer, template, recipe.chat, row_length=most)
    where = f"{survey.path}, document"
    if survey.kind == "pairs":
        pairs = PreferenceEncoder(chat or Encoder(tokenizer, num_workers=None), tokenizer, most)
        answers = (pairs.answers(text.encode(), f"{where} {n}") for n, text in enumerate(survey.texts, start=1))
        return [max(answer.ids.size for answer in each) for each in answers]
    if chat is None:
        # One more at each end, at most.
        lengths = Encoder(tokenizer, num_workers=None).encode([text.encode() for text in survey.texts]).lengths
        return [int(length) + 2 for length in lengths]
    return [chat.encode(text.encode(), f"{where} {n}").ids.size for n, text in enumerate(survey.texts, start=1)]


def row_length_for(lengths: Sequence[int], most: int, *, split: bool) -> int:
    """Returns tokens of a row that hold documents, in steps of 64.

    Args:
        lengths: Tokens of some documents.
        most: Tokens that a row may have.
        split: True if longer documents go on in another row, so that none is lost.
    """
    ordered = sorted(lengths)
    nearly_all, longest = ordered[int(0.99 * (len(ordered) - 1))], ordered[-1]
    # A single long one would leave rows for all others nearly empty or few.
    wanted = longest if not split and longest <= 2 * nearly_all else nearly_all
    return min(most, -(-wanted // 64) * 64)

"""A source of the recipe, resolved: what it is made of (for the cache's key), and its documents in order.

Documents are normalised, split and weighted by their hash alone; of a classifier each class is split by itself, and
preferences are split by their prompt's, so that answers to one prompt are on one side.
"""

import itertools
import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from finetune.config.recipe_paths import check_split, data_files_below, find_files
from finetune.config.recipe_schema import Source
from finetune.data.sources.conversation_formats import RecordForm
from finetune.data.sources.preference_formats import Preference
from finetune.data.sources.readers import (
    BATCH_ROWS,
    Document,
    Fields,
    class_names,
    document_of,
    file_classes,
    label_order,
    read_file,
    refuse_unreadable,
    require_fields,
    too_long,
)
from finetune.data.sources.streams import MAX_DOCUMENT_BYTES, Meter, require_encodable
from finetune.data.synthetic import story_generator
from finetune.utils import json_files
from finetune.utils.atomic_files import file_digest, file_state
from finetune.utils.errors import DataError
from finetune.utils.exact import exact_product

_RANGE = 1 << 64
# A second, independent hash: the half of a source that a weight keeps must not be the half that is held out.
_WEIGHT_SEED = 1


@dataclass(frozen=True)
class Corpus:
    """The documents of one source."""

    source: Source
    name: str
    """The name that people know it by, for reports."""
    fields: Fields
    """Fields that are taken from each record."""
    content: Any
    """Changes when the documents change, and not with where the files lie."""
    _read: Callable[[Meter], Iterator[Document]]
    places: tuple[str, ...]
    """Beginnings of error messages: its files, in order, or its name."""
    size: int | None = None
    """Bytes of its files; None where it has none, or is not read to its end."""
    files: str = ""
    """Formats of its files, where there are several, and what beside them is not read."""
    meter: Meter = field(default_factory=Meter)
    """The part of `size` that has been read."""
    states: Mapping[Path, Sequence[int]] = field(default_factory=dict)
    """The `file_state` of each file from before it was digested for `content`."""

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Lists all that shapes its documents: part of the cache's key."""
        form, classes = self.fields.form, self.fields.classes
        taken = form.fingerprint() if form else [self.fields.text, self.fields.label]
        taken += [self.fields.pair] if self.fields.pair is not None else []
        taken += list(self.fields.key)
        identity = {"content": self.content, "fields": taken, "weight": self.source.weight, "limit": self.source.limit}
        identity |= {"weights": self.fields.weight} if self.fields.weight is not None else {}
        return {**identity, "classes": classes} if classes else identity

    def documents(self) -> Iterator[Document]:
        """Reads from the start, in a fixed order.

        Raises:
            DataError: If something in the source cannot be read, or has changed meanwhile, or a text holds half a
                character (a lone surrogate).
        """
        self.meter.done = 0
        for document in itertools.islice(self._read(self.meter), self.source.limit):
            require_encodable(document.text, document.where, "text")
            require_encodable(document.pair, document.where, f"field '{self.fields.pair}'")
            for label in document.labels:
                require_encodable(label, document.where, f"field '{self.fields.label}'")
            if self.fields.form is None:
                yield document
            else:  # a line for each that the record holds
                yield from (document._replace(text=text) for text in document.text.split("\n"))
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raises a `DataError` if a file may hold something else than `content` says, or has in the meantime."""
        for path, state in self.states.items():
            with refuse_unreadable(path):
                if file_state(path) != state:
                    raise DataError(
                        f"{path} was changed while it was read, so that what was read of it is of no one version. "
                        "Start again once nothing writes to it; a program that writes it anew should write another "
                        "file, and rename that."
                    )


def open_source(source: Source, fields: Fields | None = None, *, form: RecordForm | None = None) -> Corpus:
    """Finds what a source names and fingerprints it; reads no documents yet.

    Args:
        fields: What is read of each record; left out, its text.
        form: The way that records become conversations, in place of `fields`.

    Raises:
        DataError: If there is no such source, or it is in no known format.
    """
    fields = fields or Fields(source.text_field, form=form)
    if source.sample is not None:
        return _open_sample(source, source.sample, fields)
    if source.path is None:
        return _open_hub(source, fields)
    files = find_files(source.path, source.split)
    if len(files) == 1 and files[0].is_dir():
        return _open_saved(source, files[0], fields)
    states, digests = _identify(files)
    content = [[path.suffix.lower(), digest] for path, digest in zip(files, digests, strict=True)]
    kinds = Counter(path.suffix.lower() for path in files)
    formats = ", ".join(f"{count:,} {suffix}" for suffix, count in kinds.items()) if len(kinds) > 1 else ""

    def read(meter: Meter) -> Iterator[Document]:
        for path in files:
            try:
                yield from read_file(path, fields, meter)
            except DataError as error:
                if path.suffix.lower() == files[0].suffix.lower():
                    raise
                raise DataError(
                    f"{error} {source.path} holds files of several formats ({formats}), which are read as one source. "
                    f"Name those of one format by a glob that ends in /**/*{files[0].suffix}."
                ) from error

    classes = next(filter(None, (file_classes(path, fields) for path in files)), ())
    size = sum(path.stat().st_size for path in files) if source.limit is None else None
    places, named = tuple(map(str, files)), fields._replace(classes=classes)
    left_out = data_files_below(Path(source.path))[1] if Path(source.path).is_dir() else []
    more = f" and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
    notes = [formats] * bool(formats) + [f"not read: {path.name}{more}" for path in left_out[:1]]
    return Corpus(source, source.path, named, content, read, places, size, "; ".join(notes), states=states)


def _open_saved(source: Source, folder: Path, fields: Fields) -> Corpus:
    """A directory that `save_to_disk` of a data set, or of a dict of splits, has written."""
    inner = folder
    if (folder / "dataset_dict.json").is_file():
        splits = [path.name for path in folder.iterdir() if path.is_dir()]
        check_split(str(folder), source.split, splits)
        inner = folder / (source.split or splits[0])
    if not (inner / "state.json").is_file():
        raise DataError(
            f"{folder} is a directory, but none that `datasets`' save_to_disk has written. Name files with a "
            f"glob instead, such as {folder}/*.jsonl."
        )
    if inner == folder:
        own = _read_saved(inner, "state.json", lambda state: state.get("_split"))
        check_split(str(folder), source.split, [own] if own is not None else [])
    # What is hashed must be what is read, and lie within the directory.
    listed = _read_saved(inner, "state.json", lambda state: [str(file["filename"]) for file in state["_data_files"]])
    for name in listed:
        if Path(name).name != name or not (inner / name).is_file():
            raise DataError(
                f"The data set in {inner} lists the file {name!r}, which is not a file in that directory. Save it "
                "again with `datasets`' save_to_disk."
            )
    states, digests = _identify(inner / name for name in sorted(listed))
    content = [[path.name, digest] for path, digest in zip(states, digests, strict=True)]
    if fields.label is not None:
        names = _read_saved(inner, "dataset_info.json", lambda info: class_names(info.get("features"), fields))
        fields = fields._replace(classes=names)

    def read(_: Meter) -> Iterator[Document]:
        import datasets

        # Arrow and JSON errors of many kinds: all mean a damaged directory.
        with DataError.explaining(f"The data set in {inner} cannot be opened", "Save it again.", Exception):
            dataset = datasets.load_from_disk(str(inner))
        return _read_dataset(dataset, fields, str(folder))

    return Corpus(source, str(source.path), fields, content, read, (str(folder),), states=states)


def _read_saved(folder: Path, name: str, take: Callable[[Any], Any]) -> Any:
    """Takes something out of a JSON file of a saved data set."""
    try:
        return take(json_files.read(folder / name))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"The data set in {folder} cannot be opened: its {name} is damaged. Save it again.") from error


def _open_hub(source: Source, fields: Fields) -> Corpus:
    import datasets

    from finetune.utils.compat.datasets_private import fingerprint

    name, split = str(source.hub), source.split or "train"
    what = f"data set '{name}' (configuration {source.hub_config or 'default'}, split '{split}')"
    advice = "Check its name and the network, or download it and give its files as `path`."
    # The hub client raises errors of several HTTP libraries.
    with DataError.explaining(f"The {what} cannot be had from the hub", advice, Exception):
        dataset = datasets.load_dataset(name, source.hub_config, revision=source.revision, split=split, streaming=False)
    fields = fields._replace(classes=class_names(dataset.features.to_dict(), fields))
    content = {"hub": fingerprint(dataset)}
    return Corpus(source, name, fields, content, lambda _: _read_dataset(dataset, fields, name), (name,))


def _read_dataset(dataset: Any, fields: Fields, name: str) -> Iterator[Document]:
    require_fields(dataset.column_names, fields, name)
    columns = fields.columns or list(dataset.column_names)
    dataset = dataset.with_format(None)  # it may have been saved with one that turns values into arrays
    number = 0
    for batch in dataset.select_columns(columns).iter(batch_size=BATCH_ROWS):
        for values in zip(*(batch[column] for column in columns), strict=True):
            number += 1
            yield document_of(dict(zip(columns, values, strict=True)), fields, f"{name}, row {number}")


def _open_sample(source: Source, count: int, fields: Fields) -> Corpus:
    """Stories; conversations, preferences or pairs of halves, where they are wanted."""
    content = {"sample": count, "version": story_generator.GENERATOR_VERSION}
    wanted = "text" if fields.form is None else fields.form.format
    made: Callable[[int], Iterator[NamedTuple]] = story_generator.stories
    kind, kinds = "story", "stories"
    if wanted == "preferences":
        made, kind, kinds = story_generator.preferences, "preference", "preferences"
    elif wanted == "embedding":
        made, kind, kinds = story_generator.halves, "pair", "pairs"
    elif wanted != "text":
        made, kind, kinds = story_generator.conversations, "conversation", "conversations"
    if wanted != "text":
        content[kinds] = story_generator.CONVERSATIONS_VERSION

    def read(_: Meter) -> Iterator[Document]:
        for number, item in enumerate(made(count), start=1):
            yield document_of(item._asdict(), fields, f"the built-in sample, {kind} {number}")

    name = f"built-in sample ({count} {kinds})"
    return Corpus(source, name, fields, content, read, (name,))


def _identify(paths: Iterable[Path]) -> tuple[dict[Path, list[int]], list[str]]:
    """Returns the `file_state` of each file from before it is digested, and the digests."""
    states, digests = {}, []
    for path in paths:
        with refuse_unreadable(path):
            states[path] = file_state(path)
            digests.append(file_digest(path))
    return states, digests


@dataclass(frozen=True)
class Rules:
    """Rules for the use of documents; part of the cache's key."""

    strip: bool
    lowercase: bool
    held_out: float
    """Share of the documents, by hash, that is kept for evaluation; of preferences by that of their prompt."""
    by_class: bool = False
    """True if that share is one of each class, for which all labels are read first."""


class Chosen(NamedTuple):
    """A document as it will be used."""

    text: bytes
    """UTF-8, of a pair the JSON of both texts, of words theirs; empty where nothing but white space was there."""
    digest: int
    """64 bits of the text."""
    held_out: bool
    copies: int
    """Times that it counts in an epoch, at least 1."""
    read: int
    """Bytes of the source's files up to its end, as far as these can be told."""
    document: Document
    """The document as it was found."""


def choose_texts(corpus: Corpus, rules: Rules, held_digests: npt.NDArray[np.uint64] | None = None) -> Iterator[Chosen]:
    """Normalises, splits and weights the documents of a source, in order.

    A held-out document counts once: evaluation reads every document once, whatever its training weight.

    Args:
        held_digests: Of the texts that are held out, sorted; None where each document's own hash decides.

    Raises:
        DataError: If a document cannot be read, or is longer than can be tokenised.
    """
    whole, fraction = divmod(corpus.source.weight, 1.0)
    held_below, kept_below = int(rules.held_out * _RANGE), int(fraction * _RANGE)
    by_prompt = held_below and corpus.fields.form is not None and corpus.fields.form.format == "preferences"
    for document in corpus.documents():
        if corpus.fields.form is not None and not document.text:
            continue  # broken, and counted where it was read
        if not document.weight:
            continue
        text = _normalised(document.text, rules)
        if document.pair is not None:
            both = [text, _normalised(document.pair, rules)]
            text = json.dumps(both, ensure_ascii=False) if any(both) else ""
        data = text.encode("utf-8")
        if len(data) > MAX_DOCUMENT_BYTES:
            raise too_long(document.where, f"{len(data) / (1 << 20):,.0f} MiB")
        digest = xxhash.xxh3_64_intdigest(data)
        copies = int(whole)
        if kept_below and xxhash.xxh3_64_intdigest(data, seed=_WEIGHT_SEED) < kept_below:
            copies += 1
        if copies:
            held_out = (_prompt_digest(data) if by_prompt else digest) < held_below
            if held_digests is not None:
                index = int(np.searchsorted(held_digests, np.uint64(digest)))
                held_out = index < held_digests.size and int(held_digests[index]) == digest
            copies = 1 if held_out else copies
            yield Chosen(data, digest, held_out, copies, corpus.meter.done, document)


def _prompt_digest(preference: bytes) -> int:
    prompt = json.dumps(Preference.from_json(preference).prompt, ensure_ascii=False)
    return xxhash.xxh3_64_intdigest(prompt.encode("utf-8"))


def label_places(corpora: Sequence[Corpus]) -> Iterator[tuple[int | str, str]]:
    """Yields the label of each document, or those of its words, with its file and line, reading them again."""
    for corpus in corpora:
        for document in corpus.documents():
            for label in document.labels:
                if isinstance(label, int | str):
                    yield label, document.where


def _normalised(text: str, rules: Rules) -> str:
    text = text.strip() if rules.strip else text
    return text.lower() if rules.lowercase else text


def held_out_digests(corpora: Sequence[Corpus], rules: Rules) -> npt.NDArray[np.uint64]:
    """Digests of the texts that are held out, sorted: of each class those with the smallest.

    A function of the set of texts and classes, whatever their order. Duplicates stay together; a text that has several
    classes counts for one of them. All that is held out is the asked share of the texts, and what its rounding leaves
    goes to the classes that miss most of theirs (the method of largest remainders). No class loses its last text.

    Raises:
        DataError: If a document cannot be read.
    """
    numbers: dict[int | str | float, int] = {}
    digests, codes = array("Q"), array("Q")
    for corpus in corpora:
        for item in choose_texts(corpus, replace(rules, held_out=0.0, by_class=False)):
            if item.text and item.document.labels:
                digests.append(item.digest)
                codes.append(numbers.setdefault(item.document.labels[0], len(numbers)))
    ordered = sorted(numbers, key=label_order)
    ranks = np.empty(len(ordered), np.int64)
    ranks[[numbers[label] for label in ordered]] = np.arange(len(ordered))
    classes = ranks[np.array(codes, np.int64)]
    order = np.argsort(classes, kind="stable")
    unique, first = np.unique(np.array(digests, np.uint64)[order], return_index=True)
    classes = classes[order][first]
    counts = np.bincount(classes, minlength=len(ordered)).tolist()
    taken = [unique[classes == number][:count] for number, count in enumerate(_shares(counts, rules.held_out))]
    return np.sort(np.concatenate([unique[:0], *taken]))


def _shares(counts: Sequence[int], share: float) -> list[int]:
    """Numbers of texts of each class that are held out."""
    wanted = [exact_product(share, count) for count in counts]
    held = [int(number) for number in wanted]
    missing = round(exact_product(share, sum(counts))) - sum(held)
    most = sorted(range(len(counts)), key=lambda n: (held[n] - wanted[n], held[n], n))
    for number in [n for n in most if held[n] + 1 < counts[n]][:missing]:
        held[number] += 1
    return held

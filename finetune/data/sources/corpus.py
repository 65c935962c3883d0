"""A source of the recipe, resolved: what it is made of (for the cache's key), and its documents in order."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from finetune.config.path_kinds import find_files
from finetune.config.recipe_schema import Source
from finetune.data.sources.conversation_formats import RecordForm
from finetune.data.sources.readers import (
    BATCH_ROWS,
    Document,
    Fields,
    class_names,
    document_of,
    file_classes,
    read_file,
    require_fields,
)
from finetune.data.sources.streams import Meter
from finetune.data.synthetic import conversation_generator, story_generator
from finetune.utils import json_files
from finetune.utils.atomic_files import file_digest
from finetune.utils.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """The documents of one source."""

    name: str
    """The name that people know it by, for reports."""
    weight: float
    fingerprint: dict[str, Any]
    """Changes when the documents change, and not with where the files lie."""
    _read: Callable[[Meter], Iterator[Document]]
    _limit: int | None
    size: int | None
    """Bytes of its files; None where it has none, or is not read to its end."""
    form: RecordForm | None = None
    """The way that records become conversations; None where they are documents."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in order of their numbers, where the source itself gives them."""
    places: tuple[str, ...] = ()
    """Beginnings of error messages: its files, in order, or its name."""
    meter: Meter = field(default_factory=Meter)
    """The part of `size` that has been read."""

    def documents(self) -> Iterator[Document]:
        """Reads from the start, in a fixed order.

        Raises:
            DataError: If something in the source cannot be read.
        """
        self.meter.done = 0
        return itertools.islice(self._read(self.meter), self._limit)


def open_source(source: Source, *, labelled: bool, form: RecordForm | None = None) -> Corpus:
    """Finds what a source names and fingerprints it; reads no documents yet.

    Args:
        source: Of the recipe.
        labelled: Whether documents have classes.
        form: How records become conversations, if they do.

    Raises:
        DataError: If there is no such source, or it is in no known format.
    """
    fields = Fields(source.text_field, source.label_field if labelled else None, form)
    if source.sample is not None:
        return _open_sample(source, source.sample, fields)
    if source.path is None:
        return _open_hub(source, fields)
    files = find_files(source.path)
    if len(files) == 1 and files[0].is_dir():
        return _open_saved(source, files[0], fields)
    content = [[path.suffix.lower(), _hash_file(path)] for path in files]

    def read(meter: Meter) -> Iterator[Document]:
        return itertools.chain.from_iterable(read_file(path, fields, meter) for path in files)

    classes = next(filter(None, (file_classes(path, fields) for path in files)), ())
    size, places = sum(path.stat().st_size for path in files), tuple(map(str, files))
    return _corpus(source, fields._replace(classes=classes), source.path, content, read, places=places, size=size)


def _corpus(
    source: Source,
    fields: Fields,
    name: str,
    content: Any,
    read: Callable[[Meter], Iterator[Document]],
    *,
    places: tuple[str, ...] = (),
    size: int | None = None,
) -> Corpus:
    """A source whose `content` changes when the documents change; `size` in bytes, where the meter goes by them."""
    form, limit, classes = fields.form, source.limit, fields.classes
    taken = form.fingerprint() if form else [fields.text, fields.label]
    fingerprint = {"content": content, "fields": taken, "weight": source.weight, "limit": limit}
    if classes:
        fingerprint["classes"] = classes
    size = size if limit is None else None
    return Corpus(name, source.weight, fingerprint, read, limit, size, form, classes, places or (name,))


def _open_saved(source: Source, folder: Path, fields: Fields) -> Corpus:
    """A directory that `save_to_disk` of a data set, or of a dict of splits, has written."""
    inner = folder
    if (folder / "dataset_dict.json").is_file():
        inner = folder / source.split
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        if source.split not in splits:
            raise DataError(
                f"The data set {folder} has no split '{source.split}'; its splits are {', '.join(splits)}. "
                "Name one of them as the source's `split`."
            )
    if not (inner / "state.json").is_file():
        raise DataError(
            f"{folder} is a directory, but none that `datasets`' save_to_disk has written. Name files with a "
            f"glob instead, such as {folder}/*.jsonl."
        )
    content = [[path.name, _hash_file(path)] for path in _arrow_files(inner)]
    if fields.label is not None:
        names = _read_saved(inner, "dataset_info.json", lambda info: class_names(info.get("features"), fields))
        fields = fields._replace(classes=names)

    def read(_: Meter) -> Iterator[Document]:
        import datasets

        try:
            dataset = datasets.load_from_disk(str(inner))
        except Exception as error:  # Arrow and JSON errors of many kinds: all mean a damaged directory.
            raise DataError(f"The data set in {inner} cannot be opened: {reason_of(error)}. Save it again.") from error
        return _read_dataset(dataset, fields, str(folder))

    assert source.path is not None
    return _corpus(source, fields, source.path, content, read, places=(str(folder),))


def _read_saved(folder: Path, name: str, take: Callable[[Any], Any]) -> Any:
    """Takes something out of a JSON file of a saved data set."""
    try:
        return take(json_files.read(folder / name))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(f"The data set in {folder} cannot be opened: its {name} is damaged. Save it again.") from error


def _arrow_files(folder: Path) -> list[Path]:
    """The files that a saved data set lists: what is hashed must be what is read, and lie within its directory."""
    names = _read_saved(folder, "state.json", lambda state: [str(file["filename"]) for file in state["_data_files"]])
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise DataError(
                f"The data set in {folder} lists the file {name!r}, which is not a file in that directory. Save it "
                "again with `datasets`' save_to_disk."
            )
    return sorted(folder / name for name in names)


def _open_hub(source: Source, fields: Fields) -> Corpus:
    import datasets

    from finetune.utils.compat.datasets_private import fingerprint

    name = str(source.hub)
    try:
        dataset = datasets.load_dataset(
            name, source.hub_config, revision=source.revision, split=source.split, streaming=False
        )
    except Exception as error:  # The hub client raises errors of several HTTP libraries.
        raise DataError(
            f"The data set '{name}' (configuration {source.hub_config or 'default'}, split '{source.split}') cannot be "
            f"had from the hub: {reason_of(error)}. Check its name and the network, or download it and give its files "
            "as `path`."
        ) from error
    fields = fields._replace(classes=class_names(dataset.features.to_dict(), fields))
    content = {"hub": fingerprint(dataset)}
    return _corpus(source, fields, name, content, lambda _: _read_dataset(dataset, fields, name))


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
    """Stories; conversations, where they are wanted."""
    content = {"sample": count, "version": story_generator.GENERATOR_VERSION}
    if fields.form is None or fields.form.format == "text":
        made: Callable[[int], Iterator[NamedTuple]] = story_generator.stories
        kind, kinds = "story", "stories"
    else:
        made, kind, kinds = conversation_generator.conversations, "conversation", "conversations"
        content[kinds] = conversation_generator.GENERATOR_VERSION

    def read(_: Meter) -> Iterator[Document]:
        for number, item in enumerate(made(count), start=1):
            yield document_of(item._asdict(), fields, f"the built-in sample, {kind} {number}")

    return _corpus(source, fields, f"built-in sample ({count} {kinds})", content, read)


def _hash_file(path: Path) -> str:
    try:
        return file_digest(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}. Check data.train and data.validation."
        ) from error


def reason_of(error: Exception) -> str:
    """The first line of a library's message, without what ends it."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(". :")

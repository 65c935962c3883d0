"""The token file: one stream of all documents' tokens, with offsets, for each side of the split.

The files of a build only grow, so that a killed one can resume.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finetune.data.prepared_cache import STATE, STATE_VERSION
from finetune.data.progress_bar import Bar
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.corpus import Chosen, Corpus, Rules, choose_texts
from finetune.data.text_issues import Issues, plain_text
from finetune.data.tokenization.encoded import WEIGHTS, Encoded, Facts
from finetune.data.tokenization.memmap import (
    GrowingArray,
    Int64s,
    MaskFile,
    Tokens,
    damaged_file,
    map_array,
    pack_mask,
)
from finetune.data.tokenization.tokenizer import batch_documents
from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, write_json
from finetune.utils.errors import DataError

FORMAT_VERSION = 5
TRAIN, HELD_OUT = "train", "held_out"
Arrays = dict[str, npt.NDArray[Any]]
SHARD_BYTES = 1 << 25
"""Text that a killed build tokenises again at most."""

_COPY_TOKENS = 1 << 22
# Columns of all kinds of documents; the digests and copies are those of the documents before any copy.
_OF_ALL, _OF_FIRST_COPIES = {"lengths": "int64", "digests": "uint64", "copies": "uint32"}, ("digests", "copies")


class Columns(NamedTuple):
    """What is stored of documents beside their tokens: types of numbers by names of columns.

    Those that some documents do without stay empty, and are left out. Bools are stored as bits.
    """

    of_documents: Mapping[str, str]
    of_tokens: Mapping[str, str]


class TokenFile:
    """One side of a finished token folder, memory-mapped."""

    def __init__(self, folder: Path, side: str, dtype: str, columns: Columns) -> None:
        """Opens what `write_tokens` has written, or raises a `DataError` if it is something else."""
        if dtype not in ("uint16", "uint32"):
            raise damaged_file(folder / f"{side}.tokens", f"its tokens are said to be {dtype}")
        self.tokens: Tokens = np.asarray(np.memmap(folder / f"{side}.tokens", dtype=np.dtype(dtype), mode="r"))
        self.columns: dict[str, Any] = {"offsets": map_array(folder / f"{side}.offsets.npy")}
        """Those that there are, by name: (documents,) or (tokens,). `offsets`, (documents + 1,), tell where each starts
        in the stream, and the end."""
        for name, kind in {**columns.of_documents, **columns.of_tokens}.items():
            file = folder / (f"{side}.{name}" if kind == "bool" else f"{side}.{name}.npy")
            if file.exists():
                self.columns[name] = MaskFile(file) if kind == "bool" else map_array(file, kind)
        self.digests: npt.NDArray[np.uint64] = map_array(folder / f"{side}.digests.npy", np.uint64)
        """(documents,): of their texts."""


def write_tokens(
    folder: Path,
    corpora: Sequence[Corpus],
    rules: Rules,
    encode_all: Callable[[Iterable[Sequence[Chosen]]], Iterator[tuple[Sequence[Chosen], Encoded]]],
    *,
    columns: Columns,
    num_ids: int,
    restore: Callable[[str], str],
    tolerance: Tolerance,
    bar: Bar,
    held_digests: npt.NDArray[np.uint64] | None = None,
) -> dict[str, Any]:
    """Tokenises all documents of some sources into a folder, or those that a killed build has left to do.

    Args:
        folder: An empty folder, or one that a killed build of the same has left.
        encode_all: Turns batches of documents into tokens, each with its batch, in order.
        columns: What is stored beside tokens.
        num_ids: Token numbers that there are.
        restore: Turns a text into tokens and back, to see whether something is lost.
        tolerance: Counts the broken conversations that reader and encoder meet.
        held_digests: See `choose_texts`.

    Returns:
        JSON-able counts: `dtype`, `labels`, and for each side that has documents what the report shows.

    Raises:
        DataError: If a document cannot be read, or there is none.
    """
    dtype = "uint16" if num_ids <= 1 << 16 else "uint32"
    as_json = any(corpus.fields.as_json for corpus in corpora)
    sides = {side: SplitWriter(folder / side, dtype, columns, restore, as_json) for side in (TRAIN, HELD_OUT)}
    shards = Shards(folder, corpora, sides, tolerance, bar)
    labels = shards.labels
    for number, corpus in enumerate(corpora):
        chosen = choose_texts(corpus, rules, held_digests)
        if not shards.begin(number, chosen):
            continue
        for batch, encoded in encode_all(batch_documents(chosen)):
            stored = _columns(batch, encoded, labels)
            held = np.fromiter((item.held_out for item in batch), np.bool_, len(batch))
            for side, mask in ((sides[TRAIN], ~held), (sides[HELD_OUT], held)):
                if mask.any():
                    side.add(batch, encoded, stored, mask)
            shards.advance(batch)
        shards.end()
    counts = {name: side.finish() for name, side in sides.items()}
    if all(count is None for count in counts.values()):
        for facts in (side.facts for side in sides.values()):
            if facts.unsupervised or facts.too_long:
                raise DataError(
                    f"Nothing is left to learn from: {facts.unsupervised} conversations have no token that is learned "
                    f"(all labels are masked), and {facts.too_long} are too long for a row. Look at chat.train_on, at "
                    "the template's {% generation %} marks and at weights of 0, or raise data.sequence_length."
                )
        names = ", ".join(corpus.name for corpus in corpora)
        raise DataError(
            f"There are no documents in {names}: nothing but white space, if anything. Name a source that holds text."
        )
    shards.clear()
    return {"dtype": dtype, "labels": list(labels), **counts}


def _columns(batch: Sequence[Chosen], encoded: Encoded, labels: dict[int | str | float, int]) -> Arrays:
    """Returns columns of a batch by their names; adds new labels to those that are known."""
    told = [item.document.labels for item in batch]
    codes = [labels.setdefault(label, len(labels)) for label in itertools.chain(*told)]
    columns = {"tokens": encoded.numbers, "lengths": encoded.lengths, **encoded.columns}
    columns["digests"] = np.array([item.digest for item in batch], np.uint64)
    columns["copies"] = np.array([item.copies for item in batch], np.uint32)
    weights = np.array([item.document.weight for item in batch], np.float32)
    if (weights != 1).any():
        columns[WEIGHTS] = np.repeat(weights, encoded.lengths)
    if encoded.words is not None:
        counts = np.array([len(of_words) for of_words in told])
        before = np.repeat(np.cumsum(counts) - counts, encoded.lengths)
        at = np.where(encoded.words >= 0, before + encoded.words, -1)
        columns["token_labels"] = np.array([*codes, -1], np.int32)[at]
    elif codes:
        columns["labels"] = np.array(codes, np.int64)
    return columns


class SplitWriter:
    """Writes one side of the split. What is held in memory does not grow with the documents."""

    def __init__(self, stem: Path, dtype: str, columns: Columns, restore: Callable[[str], str], as_json: bool) -> None:
        """Opens the files of a side, or creates them.

        Args:
            stem: Beginning of their paths.
            restore: Turns a text into tokens and back.
            as_json: Whether texts are kept as JSON; see `Fields`.
        """
        self._stem = stem
        self._restore, self._as_json = restore, as_json
        self._of_tokens = {"tokens", *columns.of_tokens}
        dtypes = {"tokens": dtype, **_OF_ALL, **columns.of_documents, **columns.of_tokens}
        # A byte for each bool, until all are there.
        paths = {name: Path(f"{stem}.{name}{'.bytes' * (kind == 'bool')}") for name, kind in dtypes.items()}
        self._files = {name: GrowingArray(paths[name], kind) for name, kind in dtypes.items()}
        self._tokens, self._lengths = self._files["tokens"], self._files["lengths"]
        self.facts = Facts()
        self._issues = Issues()
        self._empty = 0
        self._sources: list[dict[str, Any]] = []
        # Of the source that is being written.
        self._first = self._first_token = self._first_copy = 0

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs, as JSON-able values, once the files are on the disk."""
        return {
            "files": [(len(file), file.sync()) for file in self._files.values()],
            "facts": vars(self.facts),
            "issues": vars(self._issues),
            "empty": self._empty,
            "sources": self._sources,
            "first": [self._first, self._first_token, self._first_copy],
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Goes back to a state; returns whether the files hold what it is about."""
        complete = [file.cut(*written) for file, written in zip(self._files.values(), state["files"], strict=True)]
        self.facts = Facts(**state["facts"])
        self._issues = Issues(**state["issues"])
        self._empty = state["empty"]
        self._sources = state["sources"]
        self._first, self._first_token, self._first_copy = state["first"]
        return all(complete)

    def begin(self) -> None:
        """Starts the documents of the next source."""
        self._first, self._first_token = len(self._lengths), len(self._tokens)
        self._first_copy = len(self._files["copies"])
        self._sources.append({"number": len(self._sources), "documents": 0, "tokens": 0, "format": "", "unread": []})

    def add(self, batch: Sequence[Chosen], encoded: Encoded, columns: Arrays, here: npt.NDArray[np.bool_]) -> None:
        """Appends documents of a batch; those without a token are only counted.

        Args:
            columns: All of the batch that is stored, by name.
            here: The documents that are of this side, (documents,).
        """
        for facts in itertools.compress(encoded.facts, here):
            self.facts.add(facts)
        if WEIGHTS in columns:
            self._fill_weights()
        kept = here & (encoded.lengths > 0)
        self._empty += int(here.sum() - kept.sum())
        done = len(self._lengths) - self._first
        self._issues.look(itertools.compress(batch, kept), done, self._restore, chat=self._as_json)
        of_tokens = np.repeat(kept, encoded.lengths)
        for name, values in columns.items():
            self._files[name].append(values[of_tokens if name in self._of_tokens else kept])

    def _fill_weights(self) -> None:
        """Gives tokens that were written without a weight, where none had another, the weight 1."""
        weights = self._files[WEIGHTS]
        while missing := len(self._tokens) - len(weights):
            weights.append(np.ones(min(missing, _COPY_TOKENS), np.float32))

    def repeat(self, form: RecordForm | None) -> None:
        """Appends the copies of the source's documents: a whole pass after the first, never side by side.

        Args:
            form: How its records were read, if they are conversations.
        """
        if len(self._files.get(WEIGHTS, ())):
            self._fill_weights()
        copies = self._files["copies"].view()[self._first_copy :]
        for number in range(1, int(copies.max(initial=1))):
            documents, offsets = self._first + np.flatnonzero(copies > number), self._offsets()
            stored = {name: file for name, file in self._files.items() if len(file) and name not in _OF_FIRST_COPIES}
            there = {name: file.view() for name, file in stored.items()}
            cuts = np.flatnonzero(np.diff(np.cumsum(there["lengths"][documents]) // _COPY_TOKENS)) + 1
            for some in np.split(documents, cuts):
                pieces = [slice(offsets[i], offsets[i + 1]) for i in some.tolist()]
                for name, values in there.items():
                    whole = name in self._of_tokens
                    stored[name].append(np.concatenate([values[p] for p in pieces]) if whole else values[some])
        source = self._sources[-1]
        source |= {"documents": len(self._lengths) - self._first, "tokens": len(self._tokens) - self._first_token}
        if form is not None:
            source |= {"format": form.detected, "unread": sorted(form.unread)}

    def finish(self) -> dict[str, Any] | None:
        """Writes what is read later; None where there is no document."""
        documents, tokens, ordered = len(self._lengths), len(self._tokens), np.sort(self._files["digests"].view())
        if not documents:
            return None
        np.save(f"{self._stem}.offsets.npy", self._offsets(), allow_pickle=False)
        for name, file in self._files.items():
            values = file.view()
            file.close()
            if values.dtype == np.bool_ and values.size:
                pack_mask(file.path, Path(f"{self._stem}.{name}"))
            elif values.size and name not in ("tokens", "lengths", "copies"):
                np.save(f"{self._stem}.{name}.npy", values, allow_pickle=False)
        return {
            "documents": documents,
            "tokens": tokens,
            "empty": self._empty,
            "duplicates": int((ordered[1:] == ordered[:-1]).sum()),
            "sources": [source for source in self._sources if source["documents"]],
            "chat": vars(self.facts) if self.facts.examples else None,
            "issues": vars(self._issues),
            "ends": dict(Counter(self.facts.ends).most_common()),
        }

    def clear(self) -> None:
        """Removes the files that only a build needs; of a side without documents all."""
        kept = {self._tokens} if len(self._lengths) else set()
        for file in self._files.values():
            if file not in kept:
                file.path.unlink()

    def _offsets(self) -> Int64s:
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths.view(), out=offsets[1:])
        return offsets


class Shards:
    """Keeps the state of a build, and goes back to the one that a killed build has left in the folder, if any.

    All files of a build only grow. After each `SHARD_BYTES` of text they are synchronised, and `state.json` is replaced
    by how long they are and what has been counted. To resume, the files are cut to these lengths, and the source that
    was being read is read again, without tokenising what is in them.
    """

    def __init__(
        self, folder: Path, corpora: Sequence[Corpus], sides: Mapping[str, SplitWriter], tolerance: Tolerance, bar: Bar
    ) -> None:
        self._path = folder / STATE
        self._corpora, self._sides, self._tolerance, self._bar = corpora, sides, tolerance, bar
        self._left: dict[str, Any] | None = None
        if self._path.exists():
            try:
                self._left = json_files.read(self._path, needed=("digest",))
                if self._left.pop("digest") != digest_of(self._left):
                    raise ValueError
            except ValueError as error:
                raise DataError(f"{self._path} is damaged. Start again: it is made anew.") from error
            if not all(side.restore(self._left["sides"][name]) for name, side in sides.items()):
                raise DataError(
                    f"{folder} is damaged: it does not hold what was tokenised. Start again: it is made anew."
                )
        state = self._left or {"labels": [], "source": 0, "documents": 0, "all_documents": 0}
        self.labels: dict[int | str | float, int] = {label: number for number, label in enumerate(state["labels"])}
        """Labels in the order that they came, and their numbers."""
        self._source: int = state["source"]
        self._documents: int = state["documents"]  # of the source, of which a state counts at least one
        self._all_documents: int = state["all_documents"]
        self._open = 0  # bytes of text since the last shard

    def begin(self, source: int, chosen: Iterator[Chosen]) -> bool:
        """Passes the documents of a source that are tokenised; returns False if all are."""
        if source < self._source:
            return False
        left, self._left = self._left, None
        if left is None:
            for side in self._sides.values():
                side.begin()
            return True
        read = deque(itertools.islice(chosen, self._documents), maxlen=1)
        # Reading again has counted again what was broken.
        self._tolerance.restore(left["broken"], left["first_broken"])
        if not read or read[0].digest != left["last"]:
            raise DataError(
                f"{self._corpora[source].name} has changed since a build that was stopped has read it. Start again."
            )
        done = self._before() + read[0].read
        sizes = [corpus.size for corpus in self._corpora]
        share = ""
        if None not in sizes:
            share = f" ({done / sum(filter(None, sizes)):.0%} of the text was tokenised before)"
        self._bar.say(f"Resuming at document {self._all_documents + 1:,}{share}.")
        self._bar.start(done)
        return True

    def advance(self, batch: Sequence[Chosen]) -> None:
        """Counts documents that were tokenised, and keeps the state if they end a shard."""
        self._documents += len(batch)
        self._all_documents += len(batch)
        self._open += sum(len(item.text) for item in batch)
        self._bar.advance(len(batch), self._before() + batch[-1].read)
        if self._open >= SHARD_BYTES:
            self._corpora[self._source].check_unchanged()
            state = {
                "version": STATE_VERSION,
                "source": self._source,
                "documents": self._documents,
                "all_documents": self._all_documents,
                "last": batch[-1].digest,
                "labels": list(self.labels),
                "broken": dict(self._tolerance.counts),
                "first_broken": self._tolerance.first,
                "sides": {name: side.state() for name, side in self._sides.items()},
            }
            write_json(self._path, {**state, "digest": digest_of(state)})
            self._open = 0

    def end(self) -> None:
        """Ends a source."""
        for side in self._sides.values():
            side.repeat(self._corpora[self._source].fields.form)
        self._source, self._documents = self._source + 1, 0

    def clear(self) -> None:
        """Removes all that only a build needs."""
        self._path.unlink(missing_ok=True)
        for side in self._sides.values():
            side.clear()

    def _before(self) -> int:
        """Bytes of the sources that are done."""
        return sum(corpus.size or 0 for corpus in self._corpora[: self._source])


def training_texts(
    corpora: Sequence[Corpus], rules: Rules, held_digests: npt.NDArray[np.uint64] | None, bar: Bar
) -> Iterator[str]:
    """Yields the texts of the training side, each document once; of conversations what is said.

    Raises:
        DataError: If there is none.
    """
    count = before = 0
    for corpus in corpora:
        for item in choose_texts(corpus, rules, held_digests):
            if item.text and not item.held_out:
                count += 1
                bar.advance(1, before + item.read)
                yield plain_text(item.text, chat=corpus.fields.as_json)
        before += corpus.size or 0
    if not count:
        raise DataError(
            "There are no training documents to train a tokenizer on: the sources of data.train hold nothing but "
            "white space, or everything is held out. Name a source that holds text, or lower data.validation_fraction."
        )

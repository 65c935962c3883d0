"""The token file: one stream of all documents' tokens, with offsets, for each side of the split.

The files of a build only grow, so that a killed one can resume.
"""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.prepared_cache import STATE, STATE_VERSION
from finetune.data.progress_bar import Bar
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.corpus import Chosen, Corpus, Rules, choose_texts
from finetune.data.text_issues import Issues, plain_text
from finetune.data.tokenization.memmap import GrowingArray, Int64s, MaskFile, damaged_file, map_array, pack_mask
from finetune.data.tokenization.tokenizer import Encoded, Facts, batch_documents
from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, write_json
from finetune.utils.errors import DataError

FORMAT_VERSION = 5
TRAIN, HELD_OUT = "train", "held_out"
SHARD_BYTES = 1 << 25
"""Text that a killed build tokenises again at most."""

_COPY_TOKENS = 1 << 22
# Files of a side while they grow, with their types (of `tokens` by the vocabulary): a number for each document, or for
# each token. Those that a task does without stay empty.
_ARRAYS: dict[str, npt.DTypeLike | None] = {
    "tokens": None,
    "lengths": np.int64,
    "labels": np.int64,
    "firsts": np.int64,
    "digests": np.uint64,
    "copies": np.uint32,
    "token_labels": np.int32,
    "loose": np.bool_,  # one byte a token that is a target, where something is masked
}
_OF_TOKENS, _OF_FIRST_COPIES = ("tokens", "token_labels", "loose"), ("digests", "copies")

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
Around = tuple[int | None, int | None]
"""Tokens that are put before and behind each document, where there are any."""


class TokenFile:
    """One side of a finished token folder, memory-mapped."""

    def __init__(self, folder: Path, side: str, dtype: str) -> None:
        """Opens what `write_tokens` has written, or raises a `DataError` if it is something else."""
        if dtype not in ("uint16", "uint32"):
            raise damaged_file(folder / f"{side}.tokens", f"its tokens are said to be {dtype}")
        self.tokens: Tokens = np.asarray(np.memmap(folder / f"{side}.tokens", dtype=np.dtype(dtype), mode="r"))
        self.offsets: Int64s = map_array(folder / f"{side}.offsets.npy")
        """(documents + 1,)"""

        def column(name: str, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any] | None:
            file = folder / f"{side}.{name}.npy"
            return map_array(file, dtype) if file.exists() else None

        self.labels: Int64s | None = column("labels")
        """(documents,): position in the folder's list of labels; None where documents have none."""
        self.firsts: Int64s | None = column("firsts")
        """(documents,): tokens of the first text of each pair; None where documents have one text."""
        self.token_labels: npt.NDArray[np.int32] | None = column("token_labels", np.int32)
        """(tokens,): position in the folder's list of labels, of the word that begins at a token; -1 where none does.
        None where words have no labels."""
        mask = folder / f"{side}.mask"
        self.mask = MaskFile(mask) if mask.exists() else None
        """The tokens that are targets; None where all are."""
        self.digests: npt.NDArray[np.uint64] = map_array(folder / f"{side}.digests.npy", np.uint64)
        """(documents,): of their texts."""


def write_tokens(
    folder: Path,
    corpora: Sequence[Corpus],
    rules: Rules,
    encode_all: Callable[[Iterable[Sequence[Chosen]]], Iterator[tuple[Sequence[Chosen], Encoded]]],
    *,
    num_ids: int,
    around: Around,
    restore: Callable[[str], str],
    tolerance: Tolerance,
    bar: Bar,
    held_digests: npt.NDArray[np.uint64] | None = None,
) -> dict[str, Any]:
    """Tokenises all documents of some sources into a folder, or those that a killed build has left to do.

    Args:
        folder: An empty folder, or one that a killed build of the same has left.
        encode_all: Turns batches of documents into tokens, each with its batch, in order.
        num_ids: Token numbers that there are.
        restore: Turns a text into tokens and back, to see whether something is lost.
        tolerance: Counts the broken conversations that reader and encoder meet.
        held_digests: See `choose_texts`.

    Returns:
        JSON-able counts: `dtype`, `labels`, and for each side that has documents what the report shows.

    Raises:
        DataError: If a document cannot be read, or there is none.
    """
    dtype = np.dtype(np.uint16 if num_ids <= 1 << 16 else np.uint32)
    sides = {side: SplitWriter(folder, side, dtype, around, restore) for side in (TRAIN, HELD_OUT)}
    shards = Shards(folder, corpora, sides, tolerance, bar)
    labels = shards.labels
    for number, corpus in enumerate(corpora):
        chosen = choose_texts(corpus, rules, held_digests)
        if not shards.begin(number, chosen):
            continue
        for batch, encoded in encode_all(batch_documents(chosen)):
            columns = _columns(batch, encoded, labels)
            held = np.fromiter((item.held_out for item in batch), np.bool_, len(batch))
            for side, mask in ((sides[TRAIN], ~held), (sides[HELD_OUT], held)):
                if mask.any():
                    side.add(batch, encoded, columns, mask)
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
    return {"dtype": dtype.name, "labels": list(labels), **counts}


def _columns(
    batch: Sequence[Chosen], encoded: Encoded, labels: dict[int | str | float, int]
) -> dict[str, npt.NDArray[Any]]:
    """Returns arrays of a batch by their names in `_ARRAYS`; adds new labels to those that are known."""
    columns: dict[str, npt.NDArray[Any]] = {
        "digests": np.array([item.digest for item in batch], np.uint64),
        "copies": np.array([item.copies for item in batch], np.uint32),
    }
    if codes := [labels.setdefault(item.label, len(labels)) for item in batch if item.label is not None]:
        columns["labels"] = np.array(codes, np.int64)
    if encoded.firsts is not None:
        columns["firsts"] = encoded.firsts
    if encoded.examples is not None:
        columns["loose"] = np.concatenate([example.mask for example in encoded.examples])
    if encoded.words is not None:
        tags = [item.tags or () for item in batch]
        positions = [labels.setdefault(tag, len(labels)) for tag in itertools.chain(*tags)]
        counts = np.array([len(of_words) for of_words in tags])
        before = np.repeat(np.cumsum(counts) - counts, encoded.lengths)
        columns["token_labels"] = np.array([*positions, -1], np.int32)[
            np.where(encoded.words >= 0, before + encoded.words, -1)
        ]
    return columns


class SplitWriter:
    """Writes one side of the split. What is held in memory does not grow with the documents."""

    def __init__(
        self, folder: Path, name: str, dtype: np.dtype[Any], around: Around, restore: Callable[[str], str]
    ) -> None:
        """Opens the files of a side in `folder`, or creates them. `restore` turns a text into tokens and back."""
        self._stem = folder / name
        self._around, self._restore = around, restore

        self._files = {kind: GrowingArray(folder / f"{name}.{kind}", of or dtype) for kind, of in _ARRAYS.items()}
        self._tokens, self._lengths = self._files["tokens"], self._files["lengths"]
        self.facts = Facts()
        self._ends: Counter[int] = Counter()
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
            "ends": list(self._ends.items()),
            "issues": vars(self._issues),
            "empty": self._empty,
            "sources": self._sources,
            "first": [self._first, self._first_token, self._first_copy],
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Goes back to a state; returns whether the files hold what it is about."""
        complete = [file.cut(*written) for file, written in zip(self._files.values(), state["files"], strict=True)]
        self.facts = Facts(**state["facts"])
        self._ends = Counter(dict(state["ends"]))
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

    def add(
        self,
        batch: Sequence[Chosen],
        encoded: Encoded,
        columns: Mapping[str, npt.NDArray[Any]],
        here: npt.NDArray[np.bool_],
    ) -> None:
        """Appends documents of a batch; those without a token are only counted.

        Args:
            columns: What is known of the batch beside tokens and lengths, by its name in `_ARRAYS`.
            here: The documents that are of this side, (documents,).
        """
        for example in itertools.compress(encoded.examples or (), here):
            self.facts.add(example.facts)
            if example.end is not None:
                self._ends[example.end] += 1
        kept = here & (encoded.lengths > 0)
        self._empty += int(here.sum() - kept.sum())
        as_json = not columns.keys().isdisjoint(("loose", "firsts", "token_labels"))
        done = len(self._lengths) - self._first
        self._issues.look(itertools.compress(batch, kept), done, self._restore, chat=as_json)
        of_tokens = np.repeat(kept, encoded.lengths)
        for name, values in columns.items():
            self._files[name].append(values[of_tokens if name in _OF_TOKENS else kept])
        numbers, sizes = encoded.numbers[of_tokens], encoded.lengths[kept].astype(np.int64)
        ends = np.cumsum(sizes)
        bos, eos = self._around
        # The end of a document and the begin of the next go to the same place, in this order.
        around = [(token, places) for token, places in ((eos, ends), (bos, ends - sizes)) if token is not None]
        if around:
            places = np.concatenate([places for _, places in around])
            numbers = np.insert(numbers, places, np.repeat([token for token, _ in around], sizes.size))
        self._tokens.append(numbers)
        self._lengths.append(sizes + len(around))

    def repeat(self, form: RecordForm | None) -> None:
        """Appends the copies of the source's documents: a whole pass after the first, never side by side.

        Args:
            form: How its records were read, if they are conversations.
        """
        copies = self._files["copies"].view()[self._first_copy :]
        for number in range(1, int(copies.max(initial=1))):
            documents, offsets = self._first + np.flatnonzero(copies > number), self._offsets()
            there = {
                name: file.view() for name, file in self._files.items() if len(file) and name not in _OF_FIRST_COPIES
            }
            cuts = np.flatnonzero(np.diff(np.cumsum(there["lengths"][documents]) // _COPY_TOKENS)) + 1
            for some in np.split(documents, cuts):
                pieces = [slice(offsets[i], offsets[i + 1]) for i in some.tolist()]
                for name, values in there.items():
                    copied = np.concatenate([values[p] for p in pieces]) if name in _OF_TOKENS else values[some]
                    self._files[name].append(copied)
        source = self._sources[-1]
        source |= {"documents": len(self._lengths) - self._first, "tokens": len(self._tokens) - self._first_token}
        if form is not None:
            source |= {"format": form.detected, "unread": sorted(form.unread)}

    def finish(self) -> dict[str, Any] | None:
        """Writes what is read later; None where there is no document."""
        documents, tokens, loose = len(self._lengths), len(self._tokens), self._files["loose"]
        if not documents:
            return None
        saved = {name: self._files[name].view() for name in ("digests", "labels", "firsts", "token_labels")}
        for name, values in {**saved, "offsets": self._offsets()}.items():
            if values.size:
                np.save(f"{self._stem}.{name}.npy", values, allow_pickle=False)
        for file in self._files.values():
            file.close()
        if len(loose):
            pack_mask(loose.path, self._stem.with_suffix(".mask"))
        ordered = np.sort(saved["digests"])
        return {
            "documents": documents,
            "tokens": tokens,
            "empty": self._empty,
            "duplicates": int((ordered[1:] == ordered[:-1]).sum()),
            "sources": [source for source in self._sources if source["documents"]],
            "chat": vars(self.facts) if len(loose) else None,
            "issues": vars(self._issues),
            "ends": {str(token): count for token, count in self._ends.most_common()},
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
        as_json = corpus.fields.form is not None or corpus.fields.pair is not None or corpus.fields.learned == "tags"
        for item in choose_texts(corpus, rules, held_digests):
            if item.text and not item.held_out:
                count += 1
                bar.advance(1, before + item.read)
                yield plain_text(item.text, chat=as_json)
        before += corpus.size or 0
    if not count:
        raise DataError(
            "There are no training documents to train a tokenizer on: the sources of data.train hold nothing but "
            "white space, or everything is held out. Name a source that holds text, or lower data.validation_fraction."
        )

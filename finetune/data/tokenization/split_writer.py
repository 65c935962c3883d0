"""Writes one side of the split; its files only grow, so that a killed build can resume."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.sources.conversation_formats import RecordForm
from finetune.data.sources.documents import Chosen
from finetune.data.text_issues import Issues
from finetune.data.tokenization.chat_examples import Example, Facts
from finetune.data.tokenization.memmap import GrowingArray, Int64s, pack_mask
from finetune.utils.errors import DataError

_COPY_TOKENS = 1 << 22


class SplitWriter:
    """Writes one side of the split. What is held in memory does not grow with the documents."""

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype[Any],
        bos: int | None,
        eos: int | None,
        restore: Callable[[str], str],
    ) -> None:
        """Opens the files of a side in `folder`, or creates them.

        Args:
            bos: Put before each document, if given.
            eos: Put behind each document, if given.
            restore: Turns a text into tokens and back.
        """
        self._stem = folder / name
        self._bos, self._eos, self._restore = bos, eos, restore

        def grow(kind: str, dtype: npt.DTypeLike) -> GrowingArray:
            return GrowingArray(folder / f"{name}.{kind}", dtype)

        self._tokens = grow("tokens", dtype)
        self._lengths = grow("lengths", np.int64)
        self._labels = grow("labels", np.int64)
        self._digests = grow("digests", np.uint64)
        self._copies = grow("copies", np.uint32)
        # One byte a token while the file grows, and only if something is masked.
        self._loose = grow("loose", np.bool_)
        self._files = (self._tokens, self._lengths, self._labels, self._digests, self._copies, self._loose)
        self._facts = Facts()
        self._ends: Counter[int] = Counter()
        self._issues = Issues()
        self._empty = 0
        self._sources: list[dict[str, Any]] = []
        # Of the source that is being written.
        self._first = self._first_token = self._first_copy = 0

    def state(self) -> dict[str, Any]:
        """Returns what `restore` needs, as JSON-able values, once the files are on the disk."""
        return {
            "files": [(len(file), file.sync()) for file in self._files],
            "facts": vars(self._facts),
            "ends": list(self._ends.items()),
            "issues": vars(self._issues),
            "empty": self._empty,
            "sources": self._sources,
            "first": [self._first, self._first_token, self._first_copy],
        }

    def restore(self, state: dict[str, Any]) -> bool:
        """Goes back to a state; returns whether the files hold what it is about."""
        complete = [file.cut(*written) for file, written in zip(self._files, state["files"], strict=True)]
        self._facts = Facts(**state["facts"])
        self._ends = Counter(dict(state["ends"]))
        self._issues = Issues(**state["issues"])
        self._empty = state["empty"]
        self._sources = state["sources"]
        self._first, self._first_token, self._first_copy = state["first"]
        return all(complete)

    def begin(self) -> None:
        """Starts the documents of the next source."""
        self._first, self._first_token, self._first_copy = len(self._lengths), len(self._tokens), len(self._copies)
        self._sources.append({"number": len(self._sources), "documents": 0, "tokens": 0, "format": "", "unread": []})

    def add(
        self,
        items: Sequence[Chosen],
        lengths: npt.NDArray[np.uint32],
        numbers: npt.NDArray[np.uint32],
        labels: Sequence[int] | None,
        examples: Sequence[Example] | None,
    ) -> None:
        """Appends documents; those without a token are only counted."""
        for example in examples or ():
            self._facts.add(example.facts)
            if example.end is not None:
                self._ends[example.end] += 1
        kept = lengths > 0
        self._empty += int((~kept).sum())
        chosen = np.flatnonzero(kept).tolist()
        done = len(self._lengths) - self._first
        self._issues.look((items[i] for i in chosen), done, self._restore, chat=examples is not None)
        self._digests.append(np.array([items[i].digest for i in chosen], np.uint64))
        self._copies.append(np.array([items[i].copies for i in chosen], np.uint32))
        if labels is not None:
            self._labels.append(np.array([labels[i] for i in chosen], np.int64))
        tokens, sizes = _surround(numbers, lengths[kept].astype(np.int64), self._bos, self._eos)
        self._tokens.append(tokens)
        self._lengths.append(sizes)
        if examples is not None:
            self._loose.append(np.concatenate([example.mask for example in examples]))

    def repeat(self, form: RecordForm | None) -> None:
        """Appends the copies of the source's documents: a whole pass after the first, never side by side.

        Args:
            form: How its records were read, if they are conversations.
        """
        copies = self._copies.view()[self._first_copy :]
        for number in range(1, int(copies.max(initial=1))):
            self._append_again(self._first + np.flatnonzero(copies > number))
        source = self._sources[-1]
        source |= {"documents": len(self._lengths) - self._first, "tokens": len(self._tokens) - self._first_token}
        if form is not None:
            source |= {"format": form.detected, "unread": sorted(form.unread)}

    def finish(self) -> dict[str, Any] | None:
        """Writes what is read later; None where there is no document."""
        documents, tokens, masked = len(self._lengths), len(self._tokens), len(self._loose) > 0
        if not documents:
            return None
        digests = self._digests.view()
        np.save(f"{self._stem}.offsets.npy", self._offsets(), allow_pickle=False)
        np.save(f"{self._stem}.digests.npy", digests, allow_pickle=False)
        if len(self._labels):
            np.save(f"{self._stem}.labels.npy", self._labels.view(), allow_pickle=False)
        for file in self._files:
            file.close()
        if masked:
            pack_mask(self._loose.path, self._stem.with_suffix(".mask"))
        ordered = np.sort(digests)
        return {
            "documents": documents,
            "tokens": tokens,
            "empty": self._empty,
            "duplicates": int((ordered[1:] == ordered[:-1]).sum()),
            "sources": [source for source in self._sources if source["documents"]],
            "chat": vars(self._facts) if masked else None,
            "issues": vars(self._issues),
            "ends": {str(token): count for token, count in self._ends.most_common()},
        }

    def clear(self) -> None:
        """Removes the files that only a build needs; of a side without documents all."""
        kept = {self._tokens} if len(self._lengths) else set()
        for file in self._files:
            if file not in kept:
                file.path.unlink()

    def explain_nothing(self) -> None:
        """Says why none of some conversations is left.

        Raises:
            DataError: If there were any.
        """
        facts = self._facts
        if facts.unsupervised or facts.too_long:
            raise DataError(
                f"Nothing is left to learn from: {facts.unsupervised} conversations have no token that is learned (all "
                f"labels are masked), and {facts.too_long} are too long for a row. Look at chat.train_on, at the "
                "template's {% generation %} marks and at weights of 0, or raise data.sequence_length."
            )

    def _append_again(self, documents: Int64s) -> None:
        """Appends documents that the files already hold."""
        offsets, lengths = self._offsets(), self._lengths.view()
        written, learned, labels = self._tokens.view(), self._loose.view(), self._labels.view()
        cuts = np.flatnonzero(np.diff(np.cumsum(lengths[documents]) // _COPY_TOKENS)) + 1
        for part in np.split(documents, cuts):
            pieces = [slice(offsets[i], offsets[i + 1]) for i in part.tolist()]
            self._tokens.append(np.concatenate([written[piece] for piece in pieces]))
            self._lengths.append(lengths[part])
            if learned.size:
                self._loose.append(np.concatenate([learned[piece] for piece in pieces]))
            if labels.size:
                self._labels.append(labels[part])

    def _offsets(self) -> Int64s:
        offsets = np.zeros(len(self._lengths) + 1, np.int64)
        np.cumsum(self._lengths.view(), out=offsets[1:])
        return offsets


def _surround(
    numbers: npt.NDArray[np.uint32], sizes: Int64s, bos: int | None, eos: int | None
) -> tuple[npt.NDArray[np.uint32], Int64s]:
    """Puts `bos` before and `eos` behind each document of a concatenation."""
    ends = np.cumsum(sizes)
    # The end of a document and the begin of the next go to the same place, in this order.
    around = [(token, places) for token, places in ((eos, ends), (bos, ends - sizes)) if token is not None]
    if not around:
        return numbers, sizes
    places = np.concatenate([places for _, places in around])
    tokens = np.repeat([token for token, _ in around], sizes.size)
    return np.insert(numbers, places, tokens), sizes + len(around)

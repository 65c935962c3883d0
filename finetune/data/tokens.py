"""The token file: one stream of all documents' tokens, with offsets, for each side of the split."""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from finetune.data import masks
from finetune.data.chat import ChatEncoder
from finetune.data.conversations import Conversation
from finetune.data.documents import Chosen, Rules, choose
from finetune.data.encoding import Encoder, batched
from finetune.data.examples import Example, Facts
from finetune.data.packing import Int64s, map_array
from finetune.data.sources import Corpus
from finetune.errors import DataError

FORMAT_VERSION = 2
TRAIN, HELD_OUT = "train", "held_out"

_COPY_TOKENS = 1 << 22

Label = int | str
Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenFile:
    """One side of a finished token folder, memory-mapped."""

    def __init__(self, folder: Path, side: str, dtype: str, *, labelled: bool, masked: bool = False) -> None:
        """Opens what `write` has written."""
        self.tokens: Tokens = np.asarray(np.memmap(folder / f"{side}.tokens", dtype=np.dtype(dtype), mode="r"))
        self.offsets: Int64s = map_array(folder / f"{side}.offsets.npy")
        """(documents + 1,)"""
        self.labels: Int64s | None = None
        """(documents,): position in the folder's list of labels."""
        if labelled:
            self.labels = map_array(folder / f"{side}.labels.npy")
        self.mask = masks.MaskFile(folder / f"{side}.mask") if masked else None
        """Which tokens are targets; None where all are."""
        self.digests: npt.NDArray[np.uint64] = np.asarray(np.load(folder / f"{side}.digests.npy", mmap_mode="r"))
        """(documents,): of their texts."""


@dataclass(frozen=True)
class Encoded:
    """Some documents as tokens."""

    lengths: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]
    """Tokens of all, in a row."""
    examples: list[Example] | None = None
    """Of conversations: the same with masks and facts."""


Encode = Callable[[Iterable[Sequence[Chosen]]], Iterator[tuple[Sequence[Chosen], Encoded]]]


def encode_with(encoder: Encoder | ChatEncoder) -> Encode:
    """What turns documents into tokens, and conversations into tokens with masks."""

    def texts(batches: Iterable[Sequence[Chosen]]) -> Iterator[tuple[Sequence[Chosen], Encoded]]:
        assert isinstance(encoder, Encoder)
        for batch, (lengths, numbers) in encoder.encode_all(batches, _text):
            yield batch, Encoded(lengths, numbers)

    def conversations(batches: Iterable[Sequence[Chosen]]) -> Iterator[tuple[Sequence[Chosen], Encoded]]:
        assert isinstance(encoder, ChatEncoder)
        for batch, examples in encoder.encode_all(batches):
            lengths = np.array([example.ids.size for example in examples], np.uint32)
            yield batch, Encoded(lengths, np.concatenate([example.ids for example in examples]), examples)

    return conversations if isinstance(encoder, ChatEncoder) else texts


def write(
    folder: Path,
    corpora: Sequence[Corpus],
    rules: Rules,
    encoder: Encoder | ChatEncoder,
    *,
    num_ids: int,
    bos: int | None,
    eos: int | None,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Tokenises all documents of some sources into a folder.

    Args:
        folder: An empty folder.
        corpora: The sources, in the order that their documents are to have.
        rules: How documents are normalised and split.
        encoder: Turns texts into tokens, or conversations.
        num_ids: Token numbers that there are.
        bos: Put before each document, if given.
        eos: Put behind each document, if given.
        advance: Called with the number of documents just done.

    Returns:
        JSON-able counts: `dtype`, `labels`, and for each side that has documents what the report shows.

    Raises:
        DataError: If a document cannot be read, or there is none.
    """
    dtype = np.dtype(np.uint16 if num_ids <= 1 << 16 else np.uint32)
    labels: dict[Label, int] = {}
    encode = encode_with(encoder)
    sides = {side: _Side(folder, side, dtype, bos, eos) for side in (TRAIN, HELD_OUT)}
    for corpus in corpora:
        for side in sides.values():
            side.begin(corpus.name)
        for batch, encoded in encode(batched(choose(corpus, rules), _text)):
            lengths, numbers, examples = encoded.lengths, encoded.numbers, encoded.examples
            codes = [labels.setdefault(item.label, len(labels)) for item in batch if item.label is not None]
            held = np.fromiter((item.held_out for item in batch), np.bool_, len(batch))
            for side, mask in ((sides[TRAIN], ~held), (sides[HELD_OUT], held)):
                if mask.any():
                    picked = np.flatnonzero(mask).tolist()
                    side.add(
                        [batch[i] for i in picked],
                        lengths[mask],
                        numbers[np.repeat(mask, lengths)],
                        [codes[i] for i in picked] if rules.labelled else None,
                        [examples[i] for i in picked] if examples is not None else None,
                    )
            advance(len(batch))
        for side in sides.values():
            side.repeat(corpus.form.detected if corpus.form else "")
    counts = {name: side.finish() for name, side in sides.items()}
    if all(count is None for count in counts.values()):
        for side in sides.values():
            side.explain_nothing()
        names = ", ".join(corpus.name for corpus in corpora)
        raise DataError(
            f"There are no documents in {names}: nothing there but white space, if anything. Name a source "
            "that "
            "holds text."
        )
    return {"dtype": dtype.name, "labels": list(labels), **counts}


def training_texts(corpora: Sequence[Corpus], rules: Rules) -> Iterator[str]:
    """The texts of the training side, each document once; of conversations what is said."""
    for corpus in corpora:
        for item in choose(corpus, rules):
            if item.text and not item.held_out:
                yield _said(item.text) if corpus.form else item.text.decode("utf-8")


def _said(document: bytes) -> str:
    found = Conversation.from_json(document)
    return found if isinstance(found, str) else "\n".join(str(m.get("content", "")) for m in found.messages)


class _Side:
    """Writes one side of the split."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype[Any], bos: int | None, eos: int | None) -> None:
        self._path = folder / f"{name}.tokens"
        self._stem = folder / name
        self._file: BinaryIO = self._path.open("wb")
        self._dtype = dtype
        self._bos, self._eos = bos, eos
        self._lengths = array("Q")
        self._labels = array("q")
        self._digests = array("Q")
        self._copies: list[int] = []
        # One byte a token while the file grows, and only if something is masked.
        self._loose = folder / f"{name}.loose"
        self._masks: BinaryIO | None = None
        self._facts = Facts()
        self._ends: Counter[int] = Counter()
        self._first = 0
        self._first_token = 0
        self._num_tokens = 0
        self._empty = 0
        self._sources: list[dict[str, Any]] = []

    def begin(self, source: str) -> None:
        """Starts the documents of the next source."""
        self._first, self._first_token = len(self._lengths), self._num_tokens
        self._copies = []
        self._sources.append({"name": source, "documents": 0, "tokens": 0, "format": ""})

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
        self._digests.extend(items[i].digest for i in chosen)
        self._copies.extend(items[i].copies for i in chosen)
        if labels is not None:
            self._labels.extend(labels[i] for i in chosen)
        tokens, sizes = _surround(numbers, lengths[kept].astype(np.int64), self._bos, self._eos)
        mask = np.concatenate([example.mask for example in examples]) if examples is not None else None
        self._append(tokens.astype(self._dtype), sizes, mask)

    def repeat(self, form: str) -> None:
        """Appends the copies of the source's documents: a whole pass after the first, never side by side."""
        copies = np.array(self._copies, np.int64)
        for number in range(1, int(copies.max(initial=1))):
            self._append_again(self._first + np.flatnonzero(copies > number))
        self._sources[-1]["documents"] = len(self._lengths) - self._first
        self._sources[-1]["tokens"] = self._num_tokens - self._first_token
        self._sources[-1]["format"] = form

    def finish(self) -> dict[str, Any] | None:
        """Closes the files; None, and no files, where there is no document."""
        self._file.close()
        if self._masks is not None:
            self._masks.close()
            masks.pack(self._loose, self._path.with_suffix(".mask"))
        if not self._lengths:
            self._path.unlink()
            self._path.with_suffix(".mask").unlink(missing_ok=True)
            return None
        np.save(f"{self._stem}.offsets.npy", self._offsets(), allow_pickle=False)
        if self._labels:
            np.save(f"{self._stem}.labels.npy", np.array(self._labels, np.int64), allow_pickle=False)
        digests = np.frombuffer(self._digests, np.uint64)
        np.save(f"{self._stem}.digests.npy", digests, allow_pickle=False)
        return {
            "documents": len(self._lengths),
            "tokens": self._num_tokens,
            "empty": self._empty,
            "duplicates": int(digests.size - np.unique(digests).size),
            "sources": [source for source in self._sources if source["documents"]],
            "chat": self._facts.to_dict() if self._masks is not None else None,
            "ends": {str(token): count for token, count in self._ends.most_common()},
        }

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

    def _append(self, tokens: Tokens, sizes: Int64s, mask: npt.NDArray[np.bool_] | None) -> None:
        self._file.write(tokens.tobytes())
        if mask is not None:
            self._masks = self._masks or self._loose.open("wb")
            self._masks.write(mask.tobytes())
        self._lengths.extend(sizes.tolist())
        self._num_tokens += int(tokens.size)

    def _append_again(self, documents: Int64s) -> None:
        """Appends documents that the file already holds."""
        self._file.flush()
        offsets = self._offsets()
        written = np.memmap(self._path, self._dtype, mode="r")
        learned = None
        if self._masks is not None:
            self._masks.flush()
            learned = np.memmap(self._loose, np.bool_, mode="r")
        labels = np.array(self._labels, np.int64)
        sizes = np.diff(offsets)[documents]
        cuts = np.flatnonzero(np.diff(np.cumsum(sizes) // _COPY_TOKENS)) + 1
        for part in np.split(documents, cuts):
            pieces = [slice(offsets[i], offsets[i + 1]) for i in part.tolist()]
            mask = np.concatenate([learned[piece] for piece in pieces]) if learned is not None else None
            self._append(np.concatenate([written[piece] for piece in pieces]), np.diff(offsets)[part], mask)
            if labels.size:
                self._labels.extend(labels[part].tolist())

    def _offsets(self) -> Int64s:
        # A copy: the array could not grow while NumPy looks at it.
        lengths = np.array(self._lengths, np.int64)
        return np.concatenate([np.array([0], np.int64), np.cumsum(lengths)])


def _surround(
    numbers: npt.NDArray[np.uint32], sizes: Int64s, bos: int | None, eos: int | None
) -> tuple[npt.NDArray[np.uint32], Int64s]:
    """Puts `bos` before and `eos` behind each document of a concatenation."""
    extra = (bos is not None) + (eos is not None)
    grown = sizes + extra
    ends = np.cumsum(grown)
    out = np.empty(int(grown.sum()), np.uint32)
    inner = np.full(out.size, True)
    if bos is not None:
        out[ends - grown] = bos
        inner[ends - grown] = False
    if eos is not None:
        out[ends - 1] = eos
        inner[ends - 1] = False
    out[inner] = numbers
    return out, grown


def _text(item: Chosen) -> bytes:
    return item.text

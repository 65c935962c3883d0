"""Normalises, splits and weights documents, by their hash alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from finetune.data.sources.corpus import Corpus
from finetune.data.sources.readers import too_long
from finetune.data.sources.streams import MAX_DOCUMENT_BYTES
from finetune.utils.errors import DataError

_RANGE = 1 << 64
# A second, independent hash: the half of a source that a weight keeps must not be the half that is held out.
_WEIGHT_SEED = 1


@dataclass(frozen=True)
class Rules:
    """What decides how documents are used; part of the cache's key."""

    strip: bool
    lowercase: bool
    held_out: float
    """Share of the documents, by hash, that is kept for evaluation."""
    labelled: bool

    @property
    def by_class(self) -> bool:
        """Whether that share is one of each class, for which all labels are read first."""
        return self.labelled and self.held_out > 0


class Chosen(NamedTuple):
    """A document as it will be used."""

    text: bytes
    """UTF-8; empty where nothing but white space was there."""
    digest: int
    """64 bits of the text."""
    held_out: bool
    copies: int
    """Times that it counts in an epoch, at least 1."""
    label: int | str | None
    where: str
    """File and line, for error messages."""
    read: int
    """Bytes of the source's files up to its end, as far as these can be told."""
    duplicate_key: str | None = None
    """See `Document`."""


def choose(corpus: Corpus, rules: Rules, held_digests: npt.NDArray[np.uint64] | None = None) -> Iterator[Chosen]:
    """Normalises, splits and weights the documents of a source, in order.

    A held-out document counts once: evaluation reads every document once, whatever its training weight.

    Args:
        held_digests: Of the texts that are held out, sorted; None where each document's own hash decides.

    Raises:
        DataError: If a document cannot be read, is longer than can be tokenised, or holds half a character (a lone
            surrogate).
    """
    whole, part = divmod(corpus.weight, 1.0)
    held_below, kept_below = int(rules.held_out * _RANGE), int(part * _RANGE)
    for document in corpus.documents():
        if corpus.form is not None and not document.text:
            continue  # broken, and counted where it was read
        text = document.text.strip() if rules.strip else document.text
        text = text.lower() if rules.lowercase else text
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise DataError(
                f"{document.where}: the text holds half a character ({text[error.start]!r}, a lone surrogate), which "
                "no encoding can represent. Mend or remove the document."
            ) from error
        if len(data) > MAX_DOCUMENT_BYTES:
            raise too_long(document.where, f"{len(data) / (1 << 20):,.0f} MiB")
        digest = xxhash.xxh3_64_intdigest(data)
        copies = int(whole)
        if kept_below and xxhash.xxh3_64_intdigest(data, seed=_WEIGHT_SEED) < kept_below:
            copies += 1
        if copies:
            held_out = digest < held_below if held_digests is None else _holds(held_digests, digest)
            copies = 1 if held_out else copies
            yield Chosen(
                data,
                digest,
                held_out,
                copies,
                document.label,
                document.where,
                corpus.meter.done,
                document.duplicate_key,
            )


def _holds(ordered: npt.NDArray[np.uint64], digest: int) -> bool:
    place = int(np.searchsorted(ordered, np.uint64(digest)))
    return place < ordered.size and int(ordered[place]) == digest

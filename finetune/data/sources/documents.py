"""Normalises, splits and weights documents, by their hash alone; of a classifier each class is split by itself."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from finetune.data.sources.corpus import Corpus
from finetune.data.sources.readers import too_long
from finetune.data.sources.streams import MAX_DOCUMENT_BYTES
from finetune.utils.errors import DataError
from finetune.utils.exact import exact_product

_RANGE = 1 << 64
# A second, independent hash: the half of a source that a weight keeps must not be the half that is held out.
_WEIGHT_SEED = 1


@dataclass(frozen=True)
class Rules:
    """Rules for the use of documents; part of the cache's key."""

    strip: bool
    lowercase: bool
    held_out: float
    """Share of the documents, by hash, that is kept for evaluation."""
    labelled: bool

    @property
    def by_class(self) -> bool:
        """True if that share is one of each class, for which all labels are read first."""
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


def choose_texts(corpus: Corpus, rules: Rules, held_digests: npt.NDArray[np.uint64] | None = None) -> Iterator[Chosen]:
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
            held_out = digest < held_below
            if held_digests is not None:
                place = int(np.searchsorted(held_digests, np.uint64(digest)))
                held_out = place < held_digests.size and int(held_digests[place]) == digest
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


def held_out_digests(corpora: Sequence[Corpus], rules: Rules) -> npt.NDArray[np.uint64]:
    """Digests of the texts that are held out, sorted: of each class those with the smallest.

    A function of the set of texts and classes, whatever their order. Duplicates stay together; a text that has several
    classes counts for one of them. All that is held out is the asked share of the texts, and what its rounding leaves
    goes to the classes that miss most of theirs (the method of largest remainders). No class loses its last text.

    Raises:
        DataError: If a document cannot be read.
    """
    numbers: dict[int | str, int] = {}
    digests, codes = array("Q"), array("Q")
    for corpus in corpora:
        for item in choose_texts(corpus, replace(rules, held_out=0.0)):
            if item.text and item.label is not None:
                digests.append(item.digest)
                codes.append(numbers.setdefault(item.label, len(numbers)))
    ordered = sorted(numbers, key=lambda label: (isinstance(label, str), label))
    ranks = np.empty(len(ordered), np.int64)
    ranks[[numbers[label] for label in ordered]] = np.arange(len(ordered))
    classes = ranks[np.array(codes, np.int64)]
    order = np.argsort(classes, kind="stable")
    found, first = np.unique(np.array(digests, np.uint64)[order], return_index=True)
    classes = classes[order][first]
    counts = np.bincount(classes, minlength=len(ordered)).tolist()
    taken = [found[classes == number][:count] for number, count in enumerate(_shares(counts, rules.held_out))]
    return np.sort(np.concatenate([found[:0], *taken]))


def _shares(counts: Sequence[int], share: float) -> list[int]:
    """Numbers of texts of each class that are held out."""
    wanted = [exact_product(share, count) for count in counts]
    held = [int(number) for number in wanted]
    missing = round(exact_product(share, sum(counts))) - sum(held)
    most = sorted(range(len(counts)), key=lambda n: (held[n] - wanted[n], held[n], n))
    for number in [n for n in most if held[n] + 1 < counts[n]][:missing]:
        held[number] += 1
    return held

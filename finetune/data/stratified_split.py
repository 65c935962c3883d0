"""Which documents of a classifier are held out: of each class its share, chosen by their hashes alone."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from finetune.data.sources.corpus import Corpus
from finetune.data.sources.documents import Rules, choose
from finetune.utils.exact import exact_product


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
        for item in choose(corpus, replace(rules, held_out=0.0)):
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
    """How many texts of each class are held out."""
    wanted = [exact_product(share, count) for count in counts]
    held = [int(number) for number in wanted]
    missing = round(exact_product(share, sum(counts))) - sum(held)
    most = sorted(range(len(counts)), key=lambda n: (held[n] - wanted[n], held[n], n))
    for number in [n for n in most if held[n] + 1 < counts[n]][:missing]:
        held[number] += 1
    return held

"""Label names to class numbers."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from finetune.data.tokenization.memmap import Int64s
from finetune.utils.errors import DataError

_SHOWN = 10


@dataclass(frozen=True)
class ClassList:
    """The classes of a data set."""

    count: int
    names: tuple[str, ...]
    """Of each class, in order of their numbers."""
    number_of: dict[int | str, int]
    """The number of each label that can occur."""

    @staticmethod
    def of(labels: Sequence[int | str], num_labels: int | None) -> "ClassList":
        """Numbers the labels of the training documents: texts in sorted order, integers as they are.

        Args:
            labels: The distinct labels.
            num_labels: Classes that the recipe asks for; None to count them.

        Raises:
            DataError: If texts and integers are mixed, there are more classes than asked for, or integers are
                not 0 to n - 1.
        """
        texts = sorted(label for label in labels if isinstance(label, str))
        numbers = sorted(label for label in labels if isinstance(label, int))
        if texts and numbers:
            raise DataError(
                f"Some labels are numbers ({_some(numbers)}) and some are texts ({_some(texts)}). Write them all as "
                "one or the other."
            )
        if texts:
            if num_labels is not None and len(texts) > num_labels:
                raise DataError(
                    f"The data has {len(texts)} classes ({_some(texts)}), and task.num_labels is {num_labels}. Raise "
                    "it, or leave it out so that classes are counted."
                )
            spare = range(len(texts), num_labels or len(texts))
            names = (*texts, *(f"LABEL_{number}" for number in spare))
            return ClassList(len(names), names, {text: number for number, text in enumerate(texts)})
        count = num_labels or max(numbers) + 1
        if numbers[0] < 0 or numbers[-1] >= count:
            raise DataError(
                f"The labels go from {numbers[0]} to {numbers[-1]}; with {count} classes they must be 0 to "
                f"{count - 1}. Number the classes from 0, or correct task.num_labels."
            )
        if num_labels is None and len(numbers) != count:
            known = set(numbers)
            # Of a label such as an id there is no list of those below it.
            missing = list(itertools.islice((n for n in range(count) if n not in known), _SHOWN))
            raise DataError(
                f"The labels go up to {numbers[-1]}, but {_some(missing, count - len(numbers))} never occur. Number "
                f"the classes from 0 without gaps, or set task.num_labels to {count} if these are real classes."
            )
        return ClassList(count, tuple(map(str, range(count))), {number: number for number in range(count)})

    def renumber(self, codes: Int64s, labels: Sequence[int | str]) -> Int64s:
        """Class numbers, (documents,), of positions in a list of labels.

        Raises:
            DataError: If a label is no class of the training documents.
        """
        unknown = [label for label in labels if label not in self.number_of]
        if unknown:
            raise DataError(
                f"The validation documents have labels that no training document has: {_some(unknown)}; known are "
                f"{_some(list(self.number_of))}. Correct the labels, or add such documents to data.train."
            )
        return np.array([self.number_of[label] for label in labels], np.int64)[codes]


def _some(labels: Sequence[Any], total: int | None = None) -> str:
    """The first of some labels, and how many more there are; `total` where `labels` are only the first themselves."""
    shown, more = labels[:_SHOWN], (total or len(labels)) - _SHOWN
    return ", ".join(map(str, shown)) + (f" and {more} more" if more > 0 else "")

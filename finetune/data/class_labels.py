"""Label names to class numbers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetune.data.sources.readers import integer_of, label_order
from finetune.data.tokenization.memmap import Int64s
from finetune.utils.errors import DataError

_SHOWN = 10
# What programs write for a missing value. It may be a name as well, so it is one.
_ABSENT = {"nan", "none", "null", "na", "n/a", "<na>", "-1"}
_OTHER_MODEL = (
    "learn other classes from a model without this head, such as its base: `AutoModel.from_pretrained(DIR)"
    ".save_pretrained(NEW_DIR)` of transformers writes one"
)


@dataclass(frozen=True)
class KnownClasses:
    """Classes that have names and numbers before a document is read."""

    names: tuple[str, ...]
    """Names in order of the classes' numbers."""
    origin: str
    """The giver of these names, for people."""
    binding: bool = True
    """True if labels that are not among them are refused; else labels are numbered as if there were no such names."""
    resizable: bool = True
    """True if there may be more classes than have names."""
    unfit: str = ""
    """Note for the user where the labels are not among them."""


@dataclass(frozen=True)
class ClassList:
    """The classes of a data set."""

    count: int
    names: tuple[str, ...]
    """Name of each class, in order of their numbers."""
    number_of: dict[int | str, int]
    """The number of each label that can occur."""
    known: KnownClasses | None = None
    """The source of the numbers, if the labels alone do not give them."""
    unfit: tuple[str, ...] = ()
    """Notes on known classes that the labels were not among."""

    @staticmethod
    def of(
        labels: Sequence[int | str],
        num_labels: int | None,
        known: Sequence[KnownClasses] = (),
        places: Iterable[tuple[int | str, str]] = (),
    ) -> "ClassList":
        """Numbers the labels of the training documents.

        Where classes are known, labels are their names or their numbers. Else integers are what they are if they are 0
        to n - 1, and other integers and texts are names, numbered in order. An integer that is written as text is that
        integer, as in CSV, which has nothing else.

        Args:
            labels: The distinct labels.
            num_labels: Classes that the recipe asks for; None to count them.
            known: Names that labels may be meant by; the first that fit are taken.
            places: Labels as they were read, each with its file and line; read for error messages only.

        Raises:
            DataError: If the labels do not fit names that are binding, texts and integers are mixed, or there are more
                classes than asked for.
        """
        unfit: tuple[str, ...] = ()
        for classes in known:
            if (class_list := _among(classes, labels, num_labels)) is not None:
                return replace(class_list, unfit=unfit)
            unfit = (*unfit, *filter(None, [classes.unfit]))
        integers = {integer_of(label) for label in labels}
        count = num_labels or len(integers)
        if integers <= {*range(count)}:
            return ClassList.named([*map(str, range(count))], unfit)
        if None in integers and len({isinstance(label, str) for label in labels}) > 1:
            first: dict[bool, str] = {}
            for label, where in places:
                first.setdefault(isinstance(label, str), f"{label!r} ({where})")
                if len(first) == 2:
                    break
            numbers, texts = (
                some(sorted(repr(label) for label in labels if isinstance(label, kind))) for kind in (int, str)
            )
            where = f" The first number is {first[False]}, and the first text {first[True]}." if len(first) == 2 else ""
            raise DataError(
                f"Some labels are numbers ({numbers}) and some are texts ({texts}).{where} "
                "Write them all as one or the other."
            )
        names = list(dict.fromkeys(str(label) for label in sorted(labels, key=label_order)))
        bare = Counter(name.strip() for name in names)
        if alike := [name for name in names if bare[name.strip()] > 1]:
            raise DataError(
                f"The labels {some([repr(name) for name in alike])} differ in white space alone, and would be "
                "classes of their own. Write each class in one way."
            )
        if num_labels is not None and len(names) > num_labels:
            raise DataError(
                f"The data has {len(names)} classes ({some(names)}), and task.num_labels is {num_labels}. Raise "
                "it, or leave it out so that classes are counted."
            )
        return ClassList.named(_padded(names, num_labels), unfit)

    @staticmethod
    def named(names: Sequence[str], unfit: tuple[str, ...]) -> "ClassList":
        """Classes that labels mean by their names; integers are names as they are written."""
        number_of = {name: number for number, name in enumerate(names)}
        return ClassList(len(names), tuple(names), _with_integers(number_of), unfit=unfit)

    def notes(self) -> tuple[str, ...]:
        """Lists what a reader should know of the names, in a line each."""
        doubtful = [name for name in self.names if name.strip().lower() in _ABSENT]
        said = [f"the class {some([repr(name) for name in doubtful])} may stand for missing labels"] if doubtful else []
        if self.known is None and any(integer_of(name) not in (None, number) for number, name in enumerate(self.names)):
            said.append(f"the model numbers the classes {some(self.names)} from 0, and has these as their names")
        return (*self.unfit, *said)

    def renumber(self, codes: Int64s, labels: Sequence[int | str]) -> Int64s:
        """Class numbers, (documents,), of positions in a list of labels.

        Raises:
            DataError: If a label is no class of the training documents.
        """
        if unknown := [label for label in labels if label not in self.number_of]:
            raise DataError(
                f"The validation documents have labels that no training document has: {some(unknown)}; known are "
                f"{some(self.names)}. Correct the labels, or add such documents to data.train."
            )
        return np.array([self.number_of[label] for label in labels], np.int64)[codes]


def some(labels: Sequence[Any]) -> str:
    """The first of some labels, and how many more there are."""
    more = len(labels) - _SHOWN
    return ", ".join(map(str, labels[:_SHOWN])) + (f" and {more} more" if more > 0 else "")


def _padded(names: Sequence[str], count: int | None) -> tuple[str, ...]:
    """The names, and made-up ones of classes that have none."""
    return (*names, *(f"LABEL_{number}" for number in range(len(names), count or len(names))))


def _among(known: KnownClasses, labels: Sequence[int | str], num_labels: int | None) -> ClassList | None:
    """The known classes, with what each label means; None if the labels are others, and may be."""
    names = known.names
    number_of: dict[int | str, int] = {name: number for number, name in enumerate(names)}
    # What CSV writes as 1 is a class of that name, or else the class of that number.
    texts = {label for label in labels if isinstance(label, str) and (label in number_of or integer_of(label) is None)}
    numbers = sorted({number for label in {*labels} - texts if (number := integer_of(label)) is not None})
    named = {number: number_of[str(number)] for number in numbers if str(number) in number_of}
    placed = {number: number for number in range(len(names))}
    by_name, by_number = len(named) == len(numbers), all(number in placed for number in numbers)
    problem = None
    if not (number_of.keys() >= texts and (by_name or by_number)):
        problem = (
            f"The labels of the documents are {some(labels)}, but {known.origin} has the classes {some(names)}. A "
            "label must be one of these names, as it is written there, or a class's number from 0. Correct the labels, "
            f"or {'correct those names' if known.resizable else _OTHER_MODEL}."
        )
    elif by_name and by_number and any(named[number] != number for number in numbers):
        problem = (
            f"The labels {some(numbers)} are names of classes that {known.origin} has ({some(names)}), and "
            "numbers of other ones. Write labels as texts in a file of JSON lines: names if these are meant."
        )
    elif num_labels is not None and (num_labels < len(names) or (num_labels > len(names) and not known.resizable)):
        problem = (
            f"task.num_labels is {num_labels}, but {known.origin} has {len(names)} classes ({some(names)}). Set it to "
            f"{len(names)}, or leave it out."
        )
    if problem is not None:
        if known.binding:
            raise DataError(problem)
        return None
    # Documents of validation may have other numbers than those of training.
    spelled = _with_integers(number_of)
    if not (by_name and len(spelled) > len(names)):
        spelled = _with_integers({str(number): number for number in placed}) | number_of
    every = _padded(names, num_labels)
    return ClassList(len(every), every, spelled, known)


def _with_integers(number_of: Mapping[Any, int]) -> dict[int | str, int]:
    """Adds the integers that names write."""
    spelled = ((integer_of(name), number) for name, number in number_of.items())
    return dict(number_of) | {integer: number for integer, number in spelled if integer is not None}

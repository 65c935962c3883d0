"""What a kind of rows says of itself, and rows that are read by it.

A kind is facts and functions: how a record is read, what is stored of a document, how documents become rows and rows
become batches. Its module has one instance, `KIND`, which a task names; nothing else asks which kind it is. Neither
torch nor transformers is imported, as recipes are refused before either is.

Shapes: B rows, T tokens a row (`sequence_length`), L tokens of the longest row of a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from finetune.config.recipe import RowFacts
from finetune.config.recipe_schema import DataSection, Recipe, Source
from finetune.data.class_labels import ClassList
from finetune.data.rows.packed_rows import PackedRows, round_up
from finetune.data.sources.conversation_formats import RecordForm
from finetune.data.sources.readers import Document, Fields, read_text
from finetune.data.tokenization.encoded import Encoded
from finetune.data.tokenization.memmap import Int64s, Tokens
from finetune.data.tokenization.special_tokens import Wrapping

if TYPE_CHECKING:
    import torch

Numbers = npt.NDArray[np.integer]
Arrays = dict[str, npt.NDArray[Any]]


class Shown(NamedTuple):
    """A document of a row, to be shown."""

    ids: npt.NDArray[np.integer]
    learned: npt.NDArray[Any]
    """Whether each token is learned, or a text that is learned behind it, empty where there is none."""
    label: tuple[str, str] | None = None
    """What is learned of the whole document, and its kind."""


def _absent(*_: Any) -> Any:
    raise TypeError("rows that a task makes itself are read by it alone")


@dataclass(frozen=True, kw_only=True)
class RowKind(RowFacts):
    """A kind of rows; by its defaults, those that a task makes itself."""

    read: Callable[[Mapping[str, Any], Fields, str], Document] = read_text
    """Takes a document out of a record, given its fields, file and line."""
    form: Callable[[RecordForm, Recipe], Any] | None = None
    """What reads a record, of which JSON is kept, given the form for conversations; None: that form where the recipe
    has a `chat` section, and else `read`."""
    key: tuple[str, ...] = ()
    """What that adds to the cache's key."""
    of_documents: Mapping[str, str] = field(default_factory=dict)
    """What is stored of each document beside its tokens: types of numbers by names of columns."""
    of_tokens: Mapping[str, str] = field(default_factory=dict)
    """The same of each token."""
    encode: Callable[[Any, list[str]], Encoded] | None = None
    """Tokens and columns of some texts, given the `Encoder`; None for those of each text or pair."""
    around: Callable[[Any, bool], tuple[Wrapping, ...]] = lambda tokenizer, paired: ()
    """Tokens around each text of a row, or around any, given a tokenizer and whether it is a pair; none if documents
    have theirs."""
    pack: Callable[[Mapping[str, Any], DataSection, Sequence[int]], PackedRows] = _absent
    """Documents to rows, given their columns, what the recipe says, and the most tokens of each text of a row."""
    count: Callable[[Mapping[str, Any], PackedRows], tuple[Int64s | None, int]] = lambda columns, packed: (None, 0)
    """Targets of each segment, None where its length says it, and labels that the documents have."""
    values: Callable[[Mapping[str, Any], Sequence[Any], ClassList | None], Any] = lambda columns, labels, classes: None
    """What is learned of each document, or what positions in the list of labels stand for."""
    targets: Callable[["TokenRows"], Int64s] = _absent
    """Targets of each row, (rows,), where they are not stored."""
    counts: Callable[["TokenRows", Numbers], Mapping[str, float]] = lambda rows, numbers: {}
    """What rows hold, beside targets, of what terms count; and of `targets` the sum of their weights, if they have
    some."""
    batch: Callable[["TokenRows", Numbers], Arrays] = _absent
    """Rows as arrays, given their numbers (B,); see the kind."""
    shapes: Callable[[Recipe], dict[str, tuple[int, ...]]] | None = None
    """Shapes of a micro-batch, for a trace; None where rows may be of any shape."""
    report: Callable[["TokenRows", Sequence[str]], dict[str, Any]] = lambda rows, names: {}
    """Fields of a `SplitReport`: counts of classes, of which the names are given, or figures of numbers."""
    shown_as: str = "learned tokens are"
    """What examples mark, for people."""
    examples: Callable[["TokenRows", int, Sequence[str]], Iterator[Shown]] = _absent
    """Documents of a row to be shown, given its number and the names of classes."""

    def fields(self, source: Source, /, *, labels: bool = True, **options: Any) -> Fields:
        """What is read of the records of a source.

        Args:
            labels: False if classes, numbers and tags are not read, as they are predicted.
            options: Further `Fields`.
        """
        return Fields(
            source.text_field,
            source.label_field if labels and self.labels else None,
            pair=None if options.get("form") is not None else source.pair_field,
            read=self.read,
            by_word=self.labels == "tag",
            key=self.key,
            weight=source.weight_field,
            takes_chat=not self.one_document,
            **options,
        )


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of tokens, read by position. Reading neither changes nor copies anything but the batch."""

    kind: RowKind
    tokens: Tokens
    packed: PackedRows
    columns: Mapping[str, Any]
    """See `TokenFile.columns`."""
    row_length: int
    """T."""
    padding_id: int
    packing: str = "padded"
    """See `data.packing`."""
    around: tuple[Wrapping, ...] = ()
    """Tokens around each text of a row."""
    values: Any = None
    """See `RowKind.values`."""
    class_weights: npt.NDArray[np.float32] | None = None
    """Factor of the losses of each class, (C,); None where none is weighted."""
    stored_targets: Int64s | None = None
    """Targets of each row, (rows,), where the kind has to read documents to count them."""
    scores: Any = None
    """What a reference gives each row, (rows, J), or a teacher each target, (targets, K); None where the task asks for
    nothing."""

    def __len__(self) -> int:
        return self.packed.num_rows

    def num_targets(self, rows: Numbers) -> int:
        """Targets that `batch(rows)` holds, without reading it."""
        return int(self._targets[rows].sum())

    def counts(self, rows: Numbers) -> Mapping[str, float]:
        """What `batch(rows)` holds of what terms count, by name; see `RowKind.counts`."""
        return self.kind.counts(self, rows)

    def num_computed(self, rows: Numbers) -> int:
        """Tokens that a network computes for `batch(rows)`, without padding."""
        texts = int((self.packed.row_starts[rows + 1] - self.packed.row_starts[rows]).sum())
        each = sum(around.size for around in self.around) * texts // max(1, len(self.around))
        return int(self.widths[rows].sum()) + each

    def batch(self, rows: Numbers) -> dict[str, "torch.Tensor"]:
        """Reads rows, (B,), as the kind says."""
        import torch

        return {name: torch.from_numpy(values) for name, values in self.kind.batch(self, rows).items()}

    def longest(self) -> Int64s:
        """All row numbers, those with the most tokens first."""
        return np.argsort(-self.widths, kind="stable")

    def pad(self, lists: Sequence[Sequence[int]]) -> Arrays:
        """Tokens of some texts as `input_ids` and `attention_mask`, (B, L) int64."""
        ids, lengths = pad(lists, self.padding_id, self.row_length), np.array([len(one) for one in lists])
        return {"input_ids": ids, "attention_mask": (np.arange(ids.shape[1]) < lengths[:, None]).astype(np.int64)}

    @cached_property
    def widths(self) -> Int64s:
        """Tokens of each row without those around its texts, or pairs of an input and its target: (rows,)."""
        return self.packed.sums(self.packed.lengths)

    @cached_property
    def target_starts(self) -> Int64s:
        """Targets before each row, and at the end all: (rows + 1,)."""
        return np.append(0, np.cumsum(self._targets))

    @cached_property
    def _targets(self) -> Int64s:
        return self.kind.targets(self) if self.stored_targets is None else self.stored_targets


def pad(lists: Sequence[Sequence[int]], fill: int, most: int) -> npt.NDArray[np.int64]:
    """Lists of numbers as one array, (B, L), filled behind their ends.

    Args:
        most: T.
    """
    padded = np.full((len(lists), min(most, round_up(max(map(len, lists), default=1)))), fill, np.int64)
    for line, numbers in zip(padded, lists, strict=True):
        line[: len(numbers)] = numbers
    return padded

"""What the data turned out to be, for people and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class SourceReport:
    """What one source gave to one side of the split."""

    name: str
    documents: int
    tokens: int


@dataclass(frozen=True)
class SplitReport:
    """The training or the validation documents."""

    documents: int
    """Documents with tokens, copies by weight counted."""
    tokens: int
    """Tokens of these, begin and end of text included."""
    rows: int
    targets: int
    """Inputs that carry a target; for classification the tokens that are read."""
    useful_share: float
    """`targets` / (`rows` x `sequence_length`)."""
    empty: int
    """Documents that give nothing to learn from: no text, or a single token."""
    duplicates: int
    """Documents whose text was there before."""
    over_long: int
    """Documents longer than a row."""
    truncated: int
    """Documents that lost their end."""
    dropped: int
    """Documents left out because they are over-long."""
    remainder_rows: int
    """Rows left out because they are incomplete."""
    sources: tuple[SourceReport, ...]


@dataclass(frozen=True)
class DataReport:
    """What was prepared, and what it took."""

    sequence_length: int
    packing: str
    vocabulary: int
    """Token numbers of the tokenizer."""
    train: SplitReport | None
    validation: SplitReport | None
    seconds: float
    reused: bool
    """Whether everything came from the cache."""

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-able values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """The report for people, one line a fact."""
        origin = "from the cache" if self.reused else "prepared"
        lines = [
            f"data: {origin} in {self.seconds:.1f} s, {self.packing} rows of {self.sequence_length} tokens, "
            f"{self.vocabulary:,} token ids"
        ]
        for name, split in (("train", self.train), ("validation", self.validation)):
            if split is not None:
                lines.extend(_split_lines(name, split))
        return lines


def _split_lines(name: str, split: SplitReport) -> list[str]:
    lines = [
        f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.rows:,} rows, "
        f"useful share {split.useful_share:.1%}"
    ]
    notes = [
        (split.duplicates, "duplicate documents"),
        (split.empty, "empty documents"),
        (split.over_long, "documents longer than a row"),
        (split.truncated, "documents truncated"),
        (split.dropped, "documents left out as too long"),
        (split.remainder_rows, "incomplete rows left out"),
    ]
    found = [f"{count:,} {what}" for count, what in notes if count]
    if found:
        lines.append(f"    {', '.join(found)}")
    if len(split.sources) > 1:
        lines.extend(f"    {s.name}: {s.documents:,} documents, {s.tokens:,} tokens" for s in split.sources)
    return lines

"""A report on the prepared data, for people and as JSON, and the bounds that a recipe sets."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from finetune.config.recipe_schema import ChecksSection
from finetune.data.class_labels import some
from finetune.data.sources.readers import DUPLICATE_KEY, SWALLOWED
from finetune.data.text_issues import LOSSY, MOJIBAKE, NUL, Finding
from finetune.data.tokenization.encoded import Facts
from finetune.utils.errors import DataError
from finetune.utils.exact import exact_product

_FIELDS = 20
# What is left out without a warning of its own.
_MOST_LEFT_OUT = 0.03
# So many classes with one document each are rather numbers of documents.
_MANY_CLASSES = 20
NO_END = "no_end"
WORDS = {
    NO_END: "documents have no end that is learned, because the tokenizer has no end-of-text token",
    LOSSY: "sampled documents are not given back by the tokenizer",
    MOJIBAKE: "documents look wrongly decoded",
    NUL: "documents hold NUL characters",
    DUPLICATE_KEY: "records have a key more than once, and its last value counts",
    SWALLOWED: "records hold line ends and column dividers between quotes, as if they had swallowed other rows",
}
"""Words for each kind of finding."""
_LEFT_OUT_ADVICE = {
    "documents without text": "name the field of the texts as the source's `text_field`, or mend the data",
    "conversations without anything to learn": (
        "look at chat.train_on, at the template's {% generation %} marks and at weights of 0"
    ),
    "broken conversations": "mend them, or name their fields and roles (the source's `fields`, `chat.roles`)",
}
COUNTED = {
    "duplicates": "duplicate documents",
    "empty": "empty documents",
    "over_long": "documents longer than a row",
    "truncated": "documents truncated",
    "labels_cut": "words behind the end of a row, whose tags are lost",
    "dropped": "documents left out as too long",
    "remainder_rows": "incomplete rows left out",
    "overlap": "documents that are training documents too",
}
"""Words for counts of a `SplitReport`."""
COUNTED_OF_CHAT = {
    "unsupervised": "conversations left out (nothing to learn)",
    "too_long": "conversations left out as too long",
    "alike": "pairs left out that differ only in what was cut off",
    "ties": "pairs whose answers have the same score",
    "cut": "conversations cut",
    "answers_cut": "answers cut",
    "tools_dropped": "conversations without their tools",
    "shared": "answers that begin inside a token of the prompt",
}
"""Words for counts of its `chat`."""


@dataclass(frozen=True)
class SourceReport:
    """The share of one source in one side of the split."""

    name: str
    documents: int
    tokens: int
    format: str = ""
    """Format of conversations; empty for documents."""
    unread: tuple[str, ...] = ()
    """Fields of these that hold something and are not read."""
    files: str = ""
    """Formats of its files, where there are several, and what beside them is not read."""


@dataclass(frozen=True)
class TargetReport:
    """Figures of the numbers that a regression learns, in their own unit. Copies by weight are counted."""

    minimum: float
    mean: float
    maximum: float
    deviation: float
    """Standard deviation of all documents, not an estimate from a sample."""

    def line(self) -> str:
        """Returns a line for people."""
        if self.minimum == self.maximum:
            return f"all targets are {self.mean:.6g}, and there is nothing to tell apart"
        return (
            f"targets: {self.minimum:.6g} to {self.maximum:.6g}, mean {self.mean:.6g}, "
            f"standard deviation {self.deviation:.6g}"
        )


@dataclass(frozen=True)
class PairReport:
    """Figures of pairs of answers. Copies by weight are counted."""

    pairs: int
    chosen: float
    """Mean number of learned tokens of chosen answers."""
    rejected: float
    """The same of rejected ones."""
    longer: int
    """Pairs whose chosen answer is the longer one."""
    shorter: int
    """Pairs whose chosen answer is the shorter one."""

    def line(self) -> str:
        """Returns a line for people."""
        best = max(self.longer, self.shorter) + (self.pairs - self.longer - self.shorter) / 2
        return (
            f"pairs: {self.pairs:,}, chosen answers of {self.chosen:.1f} tokens on average and rejected ones of "
            f"{self.rejected:.1f}; the chosen one is longer in {self.longer:,} and shorter in {self.shorter:,}: length "
            f"alone predicts {best / max(1, self.pairs):.1%}"
        )


@dataclass(frozen=True)
class SplitReport:
    """The training or the validation documents."""

    documents: int
    """Documents with tokens, copies by weight counted."""
    tokens: int
    """Tokens of these, begin and end of text included."""
    rows: int
    targets: int
    """Inputs that carry a target; for classification the tokens that are read; of tagged words those with a tag."""
    useful_share: float
    """Places that hold an input with a token behind it / (`rows` x `sequence_length`)."""
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
    overlap: int = 0
    """Validation documents that are training documents too."""
    broken: dict[str, int] = field(default_factory=dict)
    """Conversations left out because they are broken, by what is wrong with them."""
    first_broken: str | None = None
    """The problem of the first one."""
    chat: Facts | None = None
    """None for documents."""
    ended_share: float = 0.0
    """Documents that the tokenizer's end-of-text token ends / `documents`; of conversations as `chat` has it."""
    findings: tuple[Finding, ...] = ()
    """Signs that texts are not what was meant."""
    classes: dict[str, int] = field(default_factory=dict)
    """Documents, or words, of each class, copies by weight counted; empty for other tasks."""
    labels_cut: int = 0
    """Labelled words behind the end of a row."""
    pairs: PairReport | None = None
    """None for other tasks than those of preferences."""
    numbers: TargetReport | None = None
    """None for other tasks than regression."""

    def left_out(self) -> dict[str, int]:
        """Counts of documents that have no row, by words for them."""
        chat = self.chat or Facts()
        counts = {
            "documents without text": self.empty,
            "documents that are too long": self.dropped + chat.too_long,
            "conversations without anything to learn": chat.unsupervised,
            "broken conversations": sum(self.broken.values()),
        }
        return {what: count for what, count in counts.items() if count}


@dataclass(frozen=True)
class DataReport:
    """A description of the prepared data."""

    sequence_length: int
    packing: str
    vocabulary: int
    """Token numbers of the tokenizer."""
    train: SplitReport | None
    validation: SplitReport | None
    seconds: float
    reused: bool
    """True if everything came from the cache."""
    notes: tuple[str, ...] = ()
    """Notes on the classes' names."""
    too_long: str = ""
    """Words for what to change where documents are left out as too long."""

    def sides(self) -> dict[str, SplitReport]:
        """The sides that there are, by their names."""
        sides = {"train": self.train, "validation": self.validation}
        return {name: split for name, split in sides.items() if split is not None}

    def lines(self) -> list[str]:
        """The report for people, one line a fact."""
        origin = "from the cache" if self.reused else "prepared"
        lines = [
            f"data: {origin} in {self.seconds:.1f} s, {self.packing} rows of {self.sequence_length} tokens, "
            f"{self.vocabulary:,} token ids"
        ]
        for name, split in self.sides().items():
            lines.extend(_split_lines(name, split))
        return [*lines, *(f"  {note}" for note in self._class_notes())]

    def start_lines(self) -> list[str]:
        """The report in a line, and behind it what in the data is to be looked at, what may spoil a model in full."""
        parts: list[str] = []
        spoiling: list[str] = []
        counted: Counter[str] = Counter()
        for name, split in self.sides().items():
            kind = "conversations" if split.chat is not None else "documents"
            rows = f"{split.rows:,} rows of {self.sequence_length} tokens from {split.documents:,} {kind}"
            parts.append(rows if not parts else f"{name} {split.rows:,} rows")
            counted.update(_notes(split))
            spoiling += [f"{name}: {_finding_line(finding)}" for finding in split.findings]
        lines = ["; ".join(parts), *spoiling] if parts else []
        if self.train is not None:
            lines += [f"{source.name}: {source.files}" for source in self.train.sources if source.files]
            chat = self.train.chat
            left_out = self.train.dropped if chat is None else chat.too_long
            share = left_out / max(1, self.train.documents + (0 if chat is None else left_out))
            if share > _MOST_LEFT_OUT:
                lines.append(f"{share:.0%} of the data left out as too long: {self.too_long}")
        if counted:
            (what, count), *more = counted.most_common()
            others = f", and {len(more)} other thing{'s' if len(more) > 1 else ''}" if more else ""
            lines.append(f"{count:,} {what}{others}; see `finetune data`")
        if self.train is not None:
            lines += _target_lines(self.train)
        return [*lines, *self._class_notes()]

    def _class_notes(self) -> list[str]:
        notes = list(self.notes)
        for name, split in self.sides().items():
            if absent := [label for label, count in split.classes.items() if not count]:
                kind = "training" if name == "train" else name
                notes.append(f"no {kind} document has the class {some(absent)}")
        classes = self.train.classes if self.train is not None else {}
        if len(classes) >= _MANY_CLASSES and max(classes.values()) == 1:
            notes.append(
                f"each of the {len(classes):,} classes has one document: `label_field` may name another column"
            )
        folded = Counter(name.casefold() for name in classes)
        if alike := [name for name in classes if folded[name.casefold()] > 1]:
            notes.append(f"the classes {some(alike)} differ in upper and lower case alone")
        return notes


def _notes(split: SplitReport) -> dict[str, int]:
    """Counts of what was found in the documents, by words for it."""
    chat = split.chat or Facts()
    notes = {
        **{what: getattr(split, key) for key, what in COUNTED.items()},
        **{f"conversations left out ({kind})": count for kind, count in split.broken.items()},
        **{what: getattr(chat, key) for key, what in COUNTED_OF_CHAT.items()},
        **{f"conversations with `{name}` unwritten": count for name, count in chat.unwritten.items()},
    }
    return {what: count for what, count in notes.items() if count}


def _split_lines(name: str, split: SplitReport) -> list[str]:
    lines = [
        f"  {name}: {split.documents:,} documents, {split.tokens:,} tokens, {split.rows:,} rows, "
        f"useful share {split.useful_share:.1%}"
    ]
    if (chat := split.chat) is not None:
        ends = ", ".join(f"{end!r} {count:,}" for end, count in chat.ends.items())
        lines.append(
            f"    {chat.examples:,} examples, {chat.answers:,} answers learned, {chat.supervised_share:.1%} of tokens "
            f"supervised, {chat.ended_share:.1%} end in a learned token{f' ({ends})' if ends else ''}"
        )
    lines += [f"    {line}" for line in _target_lines(split)]
    if notes := [f"{count:,} {what}" for what, count in _notes(split).items()]:
        lines.append(f"    {', '.join(notes)}")
    lines += [f"    {_finding_line(finding)}" for finding in split.findings]
    for source in split.sources if len(split.sources) > 1 or split.chat is not None else ():
        form = f"{source.format}, " if source.format else ""
        lines.append(f"    {source.name}: {form}{source.documents:,} documents, {source.tokens:,} tokens")
    for source in split.sources:
        if source.files:
            lines.append(f"    {source.name}: {source.files}")
        if source.unread:
            more = f" and {len(source.unread) - _FIELDS} more" if len(source.unread) > _FIELDS else ""
            lines.append(f"    {source.name}: fields that are not read: {', '.join(source.unread[:_FIELDS])}{more}")
    return lines


def _finding_line(finding: Finding) -> str:
    return f"{finding.count:,} of {finding.of:,} {WORDS[finding.kind]}; the first: {finding.example}"


def _target_lines(split: SplitReport) -> list[str]:
    """Returns a line on the classes, the largest first, or on the numbers that are learned; none for other tasks."""
    if (figures := split.numbers or split.pairs) is not None:
        return [figures.line()]
    ordered = sorted(split.classes.items(), key=lambda item: -item[1])
    return [f"classes: {some([f'{name} {count:,}' for name, count in ordered])}"] if ordered else []


def check_bounds(report: DataReport, bounds: ChecksSection, *, labelled: bool = False) -> None:
    """Raises a `DataError` with all bounds of the recipe that do not hold; labelled documents have no end to learn."""
    problems = [
        f"{name}: {problem}"
        for name, split in report.sides().items()
        for problem in _problems(split, bounds, labelled, report.too_long)
    ]
    if problems:
        raise DataError(f"The data is not what the recipe allows: {'; '.join(problems)}. Mend it, or the bounds.")


def _problems(split: SplitReport, bounds: ChecksSection, labelled: bool, too_long_advice: str) -> Iterator[str]:
    chat, left_out = split.chat or Facts(), split.left_out()
    kind, ended = ("documents", "documents") if split.chat is None else ("conversations", "examples")
    broken, too_long = sum(split.broken.values()), split.truncated + split.dropped + chat.too_long + chat.cut
    read = broken + split.documents + chat.too_long + chat.unsupervised
    kinds = ", ".join(f"{count} {kind}" for kind, count in split.broken.items())
    bad = f"conversations are broken ({kinds}; the first: {split.first_broken})"
    why = ", ".join(f"{what} {count:,}" for what, count in left_out.items())
    advice = _LEFT_OUT_ADVICE.get(max(left_out, key=left_out.__getitem__, default=""), too_long_advice)
    lost = f"{kind} would be left out ({why}): {advice}"
    all_left_out = sum(left_out.values())
    could_be_read = split.documents - split.dropped + all_left_out
    most = [
        ("max_broken", bounds.max_broken, broken, read, bad),
        ("max_too_long", bounds.max_too_long, too_long, read, "documents are longer than a row"),
        ("max_unsupervised", bounds.max_unsupervised, chat.unsupervised, read, "conversations hold nothing to learn"),
        ("max_left_out", bounds.max_left_out, all_left_out, could_be_read, lost),
        ("max_overlap", bounds.max_overlap, split.overlap, split.documents, "documents are training documents too"),
    ]
    by_kind = {
        LOSSY: ("max_lossy", bounds.max_lossy),
        MOJIBAKE: ("max_mojibake", bounds.max_mojibake),
        NUL: ("max_nul", bounds.max_nul),
        DUPLICATE_KEY: ("max_duplicate_keys", bounds.max_duplicate_keys),
    }
    for finding in split.findings:
        if finding.kind in by_kind:
            what = f"{WORDS[finding.kind]} (the first: {finding.example})"
            most.append((*by_kind[finding.kind], finding.count, finding.of, what))
    least = []
    if split.chat is not None:
        least.append(("min_supervised", bounds.min_supervised, chat.supervised_share, "of the tokens are learned"))
    if not labelled:
        what = f"of the {ended} end in a special token that is learned"
        least.append(("min_ended", bounds.min_ended, split.ended_share, what))
    for key, bound, count, total, what in most:
        if count > exact_product(bound, total):
            yield f"{count:,} of {total:,} {what}, and checks.{key} is {bound:g}"
    for key, bound, share, what in least:
        if share < bound:
            yield f"{share:.1%} {what}, and checks.{key} is {bound:g}"

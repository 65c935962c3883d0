"""What the data report may say: shares that a recipe sets bounds to, and what they were."""

from collections.abc import Iterator

from finetune.data.issues import DUPLICATE_KEY, LOSSY, MOJIBAKE, NUL
from finetune.data.report import WORDS, DataReport, SplitReport
from finetune.errors import DataError
from finetune.recipe import ChecksSection


def check(report: DataReport, bounds: ChecksSection, *, labelled: bool = False) -> None:
    """Compares the report with the recipe's bounds.

    Args:
        report: What there is.
        bounds: What may be.
        labelled: Whether documents have classes, and so no end.

    Raises:
        DataError: With all of them that do not hold.
    """
    problems = []
    for name, split in (("train", report.train), ("validation", report.validation)):
        if split is not None:
            problems += [f"{name}: {problem}" for problem in _problems(split, bounds, labelled)]
    if problems:
        raise DataError(f"The data is not what the recipe allows: {'; '.join(problems)}. Mend it, or the bounds.")


def _problems(split: SplitReport, bounds: ChecksSection, labelled: bool) -> Iterator[str]:
    chat = split.chat
    broken = sum(split.broken.values())
    read = broken + split.documents
    too_long, unsupervised = split.truncated + split.dropped, 0
    if chat is not None:
        too_long += chat.too_long + chat.cut
        unsupervised = chat.unsupervised
        read += chat.too_long + chat.unsupervised
    if broken:
        kinds = ", ".join(f"{count} {kind}" for kind, count in split.broken.items())
        more = f" ({kinds}; the first: {split.first_broken})"
        yield from _above("max_broken", bounds.max_broken, broken, read, f"conversations are broken{more}")
    yield from _above("max_too_long", bounds.max_too_long, too_long, read, "documents are longer than a row")
    nothing = "conversations hold nothing to learn"
    yield from _above("max_unsupervised", bounds.max_unsupervised, unsupervised, read, nothing)
    both = "documents are training documents too"
    yield from _above("max_overlap", bounds.max_overlap, split.overlap, split.documents, both)
    if chat is not None and chat.supervised_share < bounds.min_supervised:
        yield _below("min_supervised", bounds.min_supervised, chat.supervised_share, "of the tokens are learned")
    if split.ended_share < bounds.min_ended and not labelled:
        what = "documents" if chat is None else "examples"
        end = f"of the {what} end in a special token that is learned"
        yield _below("min_ended", bounds.min_ended, split.ended_share, end)
    most = {
        LOSSY: ("max_lossy", bounds.max_lossy),
        MOJIBAKE: ("max_mojibake", bounds.max_mojibake),
        NUL: ("max_nul", bounds.max_nul),
        DUPLICATE_KEY: ("max_duplicate_keys", bounds.max_duplicate_keys),
    }
    for found in split.findings:
        if found.kind in most:
            what = f"{WORDS[found.kind]} (the first: {found.example})"
            yield from _above(*most[found.kind], found.count, found.of, what)


def _above(key: str, bound: float, count: int, total: int, what: str) -> Iterator[str]:
    if count > bound * total:
        yield f"{count:,} of {total:,} {what}, and checks.{key} is {bound:g}"


def _below(key: str, bound: float, share: float, what: str) -> str:
    return f"{share:.1%} {what}, and checks.{key} is {bound:g}"

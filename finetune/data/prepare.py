"""From a recipe to rows: read, normalise, tokenise, pack, each step kept in the cache under its own key."""

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finetune.config.recipe_schema import DataSection, Recipe, Source
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.chat.chat_templates import find_template
from finetune.data.class_labels import ClassList, KnownClasses
from finetune.data.data_report import NO_END, DataReport, SourceReport, SplitReport, chat_report, check_bounds
from finetune.data.prepared_cache import Cache, Entry
from finetune.data.progress_bar import documents_bar
from finetune.data.rows import packing
from finetune.data.rows.row_dataset import TokenRows
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.corpus import Corpus, open_source
from finetune.data.sources.documents import Rules, held_out_digests
from finetune.data.text_issues import Finding, findings
from finetune.data.tokenization import build_tokenizer, token_files
from finetune.data.tokenization.build_tokenizer import load_tokenizer, train_tokenizer
from finetune.data.tokenization.encoding import Encoder
from finetune.data.tokenization.memmap import map_array
from finetune.utils.atomic_files import digest_of
from finetune.utils.errors import DataError

_HELD = "held.npy"


@dataclass(frozen=True)
class PreparedData:
    """All that training and evaluation read."""

    train: TokenRows | None
    """None if the recipe names no training source."""
    validation: TokenRows | None
    """None if no document is for validation."""
    tokenizer: PreTrainedTokenizerBase
    num_labels: int | None
    """Classes of a sequence classification; None for other tasks."""
    label_names: tuple[str, ...]
    report: DataReport
    digest: str
    """Digest of everything that shaped the training rows (the validation rows if there are no others)."""


@dataclass(frozen=True)
class _Side:
    """One side of a token folder, packed."""

    entry: Entry
    side: str
    file: token_files.TokenFile
    rows_entry: Entry
    digest: str


def prepare_data(
    recipe: Recipe, *, labelled: bool = False, known: KnownClasses | None = None, quiet: bool = False
) -> PreparedData:
    """Prepares the recipe's data, or finds it prepared.

    Any number of processes may call this at once: one works, the others wait and then read. Call it before
    there is a process group, so that nobody waits inside a collective.

    Args:
        recipe: What to prepare.
        labelled: Whether documents have classes.
        known: The classes of the pretrained classifier that the recipe starts from, if it does.
        quiet: Show no progress and do not say when this process waits.

    Raises:
        DataError: If data or tokenizer cannot be used as the recipe says.
    """
    return _Preparation(recipe, labelled, known, quiet=quiet).run()


class _Preparation:
    """The steps for one recipe, with what they share."""

    def __init__(self, recipe: Recipe, labelled: bool, known: KnownClasses | None, *, quiet: bool) -> None:
        self._recipe = recipe
        self._known = known
        self._data: DataSection = recipe.data
        self._quiet = quiet
        self._labelled = labelled
        self._cache = Cache(Path(recipe.data.cache_dir), quiet=quiet)
        self._reused = True
        self._tolerance = Tolerance(lenient=recipe.checks.max_broken > 0)

    def run(self) -> PreparedData:
        began = time.monotonic()
        data = self._data
        if not data.train and not data.validation:
            raise DataError("The recipe names no documents. Name at least one source in data.train.")
        for number, source in enumerate(data.validation):
            if source.weight != 1.0:
                raise DataError(
                    f"data.validation.{number}.weight is {source.weight:g}, but evaluation reads every document once. "
                    "Remove the weight; `limit` reads fewer documents."
                )
        held_out = data.validation_fraction if data.train and not data.validation else 0.0
        train_corpora, train_rules = self._open(data.train), self._rules(held_out)
        self._tokenizer = self._find_tokenizer(train_corpora, train_rules)
        self._encoder = self._find_encoder()
        self._wrapping = build_tokenizer.wrapping_of(self._tokenizer) if self._labelled else build_tokenizer.Wrapping()

        train = validation = None
        validation_corpora = self._open(data.validation)
        if data.train:
            entry, digest = self._tokenise(train_corpora, train_rules)
            if entry.facts[token_files.TRAIN] is None:
                raise DataError(
                    f"All documents of data.train are held out for validation ({data.validation_fraction:g} of them "
                    "by hash), and none is left to learn from. Lower data.validation_fraction, or add documents."
                )
            train = self._pack(entry, token_files.TRAIN, digest)
            if entry.facts[token_files.HELD_OUT] is not None:
                validation = self._pack(entry, token_files.HELD_OUT, digest)
        if data.validation:
            entry, digest = self._tokenise(validation_corpora, self._rules(0.0))
            validation = self._pack(entry, token_files.TRAIN, digest)

        first = train or validation
        assert first is not None
        classes = None
        if self._labelled:
            known = [self._known] if self._known is not None else []
            named = [corpus for corpus in (*train_corpora, *validation_corpora) if corpus.classes]
            known += [KnownClasses(corpus.classes, corpus.name) for corpus in named[:1]]
            classes = ClassList.of(first.entry.facts["labels"], self._recipe.task.num_labels, known)
        train_rows = self._rows(train, classes) if train else None
        validation_rows = self._rows(validation, classes) if validation else None
        for rows, documents in (
            (train_rows, "The training documents"),
            (validation_rows if data.validation else None, "The documents of data.validation"),
        ):
            if rows is not None and len(rows) == 0:
                raise DataError(
                    f"{documents} fill no row of {data.sequence_length} tokens (packing {data.packing}, long_documents "
                    f"{data.long_documents}, remainder {data.remainder}). Add documents, or lower data.sequence_length."
                )
        report = DataReport(
            sequence_length=data.sequence_length,
            packing=data.packing,
            vocabulary=self._num_ids,
            train=self._report(train, train_rows, classes) if train else None,
            validation=self._report(validation, validation_rows, classes, against=train) if validation else None,
            notes=classes.notes() if classes else (),
            seconds=time.monotonic() - began,
            reused=self._reused,
        )
        check_bounds(report, self._recipe.checks, labelled=self._labelled)
        return PreparedData(
            train=train_rows,
            validation=validation_rows or None,
            tokenizer=self._tokenizer,
            num_labels=classes.count if classes else None,
            label_names=classes.names if classes else (),
            report=report,
            digest=_digest(first, classes),
        )

    def _open(self, sources: Sequence[Source]) -> list[Corpus]:
        chat, corpora = self._recipe.chat, []
        for source in sources:
            form = None
            if chat is not None:
                named = (source.format, source.fields, chat.roles, source.text_field)
                form = RecordForm(*named, strip=self._data.strip, tolerance=self._tolerance)
            corpora.append(open_source(source, labelled=self._labelled, form=form))
        return corpora

    def _rules(self, held_out: float) -> Rules:
        if self._recipe.chat is not None:
            # What is hashed and kept is JSON, and what is said in it stays as it is.
            return Rules(False, False, held_out, False)
        return Rules(self._data.strip, self._data.lowercase, held_out, self._labelled)

    def _key(self, corpora: Sequence[Corpus], rules: Rules) -> dict[str, Any]:
        """Lists all that shapes the texts of some sources."""
        key = {
            "format": token_files.FORMAT_VERSION,
            "sources": [corpus.fingerprint for corpus in corpora],
            "rules": list(astuple(rules)),
        }
        return {**key, "split": "by class"} if rules.by_class else key

    def _held(self, corpora: Sequence[Corpus], rules: Rules) -> npt.NDArray[np.uint64] | None:
        """Finds what is held out, where a document's own hash does not say it."""
        if not rules.by_class:
            return None

        def build(folder: Path) -> dict[str, Any]:
            found = held_out_digests(corpora, rules)
            np.save(folder / _HELD, found, allow_pickle=False)
            return {"count": int(found.size)}

        entry = self._built(self._cache.entry(f"held-{digest_of(self._key(corpora, rules))}", build))
        return map_array(entry.folder / _HELD, np.uint64) if entry.facts["count"] else np.array([], np.uint64)

    def _built(self, entry: Entry) -> Entry:
        self._reused = self._reused and entry.reused
        return entry

    def _find_tokenizer(self, corpora: Sequence[Corpus], rules: Rules) -> PreTrainedTokenizerBase:
        vocab_size = self._recipe.tokenizer.vocab_size
        if vocab_size is None:
            return load_tokenizer(self._recipe)
        if not corpora:
            raise DataError(
                "tokenizer.vocab_size trains a tokenizer on data.train, which is empty. Name a source in data.train, "
                "or an existing tokenizer as tokenizer.name."
            )

        held = self._held(corpora, rules)

        def build(folder: Path) -> dict[str, Any]:
            with documents_bar("training the tokenizer", [c.size for c in corpora], quiet=self._quiet) as bar:
                trained = train_tokenizer(token_files.training_texts(corpora, rules, held, bar), vocab_size)
            trained.save_pretrained(str(folder))
            return {}

        key = {"texts": self._key(corpora, rules), "vocab_size": vocab_size, "trainer": build_tokenizer.TRAINER_VERSION}
        entry = self._built(self._cache.entry(f"tokenizer-{digest_of(key)}", build))
        return AutoTokenizer.from_pretrained(str(entry.folder), trust_remote_code=False)

    # Both read the whole vocabulary.
    @cached_property
    def _num_ids(self) -> int:
        return build_tokenizer.num_ids(self._tokenizer)

    @cached_property
    def _identity(self) -> dict[str, Any]:
        return build_tokenizer.tokenizer_identity(self._tokenizer)

    def _find_encoder(self) -> Encoder | ChatEncoder:
        chat = self._recipe.chat
        if chat is None:
            return Encoder(self._tokenizer, num_workers=self._data.num_workers)
        template = find_template(self._tokenizer, chat.template, chat.template_args)
        if chat.template is not None:
            # What is trained is what the saved tokenizer writes.
            self._tokenizer.chat_template = template.text
        return ChatEncoder(
            self._tokenizer,
            template,
            chat,
            row_length=self._data.sequence_length,
            around=self._around(),
            tolerance=self._tolerance,
        )

    def _around(self) -> tuple[int | None, int | None]:
        """Tokens that go before and behind a document of plain text."""
        # A classifier's special tokens go around the text when a batch is built, behind any truncation.
        bos = self._tokenizer.bos_token_id if self._data.add_bos and not self._labelled else None
        eos = self._tokenizer.eos_token_id if self._data.add_eos and not self._labelled else None
        return bos, eos

    def _tokenise(self, corpora: Sequence[Corpus], rules: Rules) -> tuple[Entry, str]:
        # A template writes what goes around a conversation.
        bos, eos = self._around() if self._recipe.chat is None else (None, None)
        held = self._held(corpora, rules)

        def build(folder: Path) -> dict[str, Any]:
            self._tolerance.restore({}, None)  # training a tokenizer has read the same records
            with documents_bar("tokenising", [corpus.size for corpus in corpora], quiet=self._quiet) as bar:
                counts = token_files.write_tokens(
                    folder,
                    corpora,
                    rules,
                    self._encoder.encode_all,
                    num_ids=self._num_ids,
                    bos=bos,
                    eos=eos,
                    restore=partial(build_tokenizer.restore_text, self._tokenizer),
                    tolerance=self._tolerance,
                    bar=bar,
                    held_digests=held,
                )
            return {
                **counts,
                "broken": dict(self._tolerance.counts),
                "first_broken": self._tolerance.first,
                "places": _places(corpora),
            }

        key: dict[str, Any] = {"texts": self._key(corpora, rules), "bos": bos, "eos": eos}
        key["tokenizer"] = self._identity
        if isinstance(self._encoder, ChatEncoder):
            key["chat"] = self._encoder.key(self._identity)
        digest = digest_of(key)
        entry = self._built(self._cache.entry(f"tokens-{digest}", build))
        return replace(entry, facts=_in_names_of(corpora, entry.facts)), digest

    def _pack(self, entry: Entry, side: str, token_digest: str) -> _Side:
        data = self._data
        room = data.sequence_length - sum(map(len, self._wrapping))
        if room < 1:
            raise DataError(
                f"data.sequence_length is {data.sequence_length}, which the {sum(map(len, self._wrapping))} special "
                "tokens of this tokenizer fill alone. Raise it."
            )
        key = {
            "tokens": token_digest,
            "side": side,
            "packing": data.packing,
            "labelled": self._labelled,
            "room": room,
            "row_length": data.sequence_length,
            "long_documents": None if data.packing == "wrapped" or self._labelled else data.long_documents,
            "remainder": data.remainder if data.packing == "wrapped" else None,
        }

        masked = self._recipe.chat is not None
        file = token_files.TokenFile(entry.folder, side, entry.facts["dtype"], labelled=self._labelled, masked=masked)

        def build(folder: Path) -> dict[str, Any]:
            if self._labelled:
                packed = packing.truncate_documents(file.offsets, room)
            elif data.packing == "wrapped":
                keep = data.remainder == "keep"
                packed = packing.wrap_stream(file.tokens.size, data.sequence_length, keep_remainder=keep)
            elif data.packing == "padded":
                packed = packing.pad_documents(file.offsets, data.sequence_length, data.long_documents)
            else:
                packed = packing.pack_documents(file.offsets, data.sequence_length, data.long_documents)
            return packing.save_rows(packed, folder, file.mask)

        digest = digest_of(key)
        return _Side(entry, side, file, self._built(self._cache.entry(f"rows-{digest}", build)), digest)

    def _rows(self, side: _Side, classes: ClassList | None) -> TokenRows:
        file, numbers = side.file, None
        if classes is not None:
            assert file.labels is not None
            numbers = classes.renumber(file.labels, side.entry.facts["labels"])
        return TokenRows(
            tokens=file.tokens,
            packed=packing.load_rows(side.rows_entry.folder),
            row_length=self._data.sequence_length,
            padding_id=build_tokenizer.padding_id(self._tokenizer),
            restarts=self._data.packing == "documents",
            fixed=self._data.packing != "padded",
            classes=numbers,
            wrapping=self._wrapping,
            mask=file.mask,
            row_targets=map_array(side.rows_entry.folder / packing.ROW_TARGETS) if file.mask else None,
        )

    def _report(
        self, side: _Side, rows: TokenRows | None, classes: ClassList | None, against: _Side | None = None
    ) -> SplitReport:
        facts, counts, made = side.entry.facts, side.entry.facts[side.side], side.rows_entry.facts
        overlap = 0
        if against is not None and against.entry is not side.entry:
            overlap = int(np.isin(side.file.digests, against.file.digests).sum())
        of_classes: dict[str, int] = {}
        if classes is not None and rows is not None and rows.classes is not None:
            documents = np.bincount(rows.classes, minlength=classes.count).tolist()
            of_classes = dict(zip(classes.names, documents, strict=True))
        found = findings(counts["issues"])
        chat, eos = None, self._tokenizer.eos_token_id
        wants_end = not self._labelled and (self._data.add_eos or self._recipe.chat is not None)
        total, ended = counts["documents"], 0
        if counts["chat"]:
            name_of = self._tokenizer.convert_ids_to_tokens
            chat = chat_report(counts["chat"], {str(name_of(int(n))): count for n, count in counts["ends"].items()})
            total, ended = counts["chat"]["examples"], counts["chat"]["ended"]
        elif wants_end and eos is not None:
            ended = total - made["truncated"]
        if wants_end and eos is None and ended < total:
            found = (Finding(NO_END, total - ended, total, counts["issues"]["first"]), *found)
        around = made["rows"] * sum(map(len, self._wrapping))
        places = made["rows"] * self._data.sequence_length
        # Records of a source belong to neither side before they are read: said once, with the training side.
        own = side.side == token_files.TRAIN
        # What was left out on purpose has no tokens either.
        left_out = chat.unsupervised + chat.too_long + chat.refused if chat else 0
        return SplitReport(
            targets=made["targets"] + around,
            useful_share=(made["pairs"] + around) / places if places else 0.0,
            empty=counts["empty"] + made["empty"] - left_out,
            sources=tuple(
                SourceReport(s["name"], s["documents"], s["tokens"], s["format"], tuple(s["unread"]))
                for s in counts["sources"]
            ),
            overlap=overlap,
            broken=facts["broken"] if own else {},
            first_broken=facts["first_broken"] if own else None,
            chat=chat,
            ended_share=ended / total if total else 0.0,
            findings=found,
            classes=of_classes,
            **{name: counts[name] for name in ("documents", "tokens", "duplicates")},
            **{name: made[name] for name in ("rows", "over_long", "truncated", "dropped", "remainder_rows")},
        )


def _digest(first: _Side, classes: ClassList | None) -> str:
    """Digest of the rows, and of the classes' numbers where the labels alone do not give these."""
    if classes is None or classes.known is None:
        return first.digest
    plain = {label: n for n, label in enumerate(sorted(map(str, first.entry.facts["labels"])))}
    numbers = {str(label): classes.number_of[label] for label in first.entry.facts["labels"]}
    given = {label: int(label) for label in numbers if label.isdecimal()}
    return first.digest if numbers in (plain, given) else digest_of({"rows": first.digest, "classes": numbers})


def _places(corpora: Sequence[Corpus]) -> list[str]:
    return [place for corpus in corpora for place in corpus.places]


def _in_names_of(corpora: Sequence[Corpus], facts: dict[str, Any]) -> dict[str, Any]:
    """Facts about tokens with the sources' present names: the same contents may have been tokenised from elsewhere."""
    names = dict(zip(facts["places"], _places(corpora), strict=True))

    def renamed(where: str | None) -> str | None:
        place = next((name for name in names if where and where.startswith(f"{name},")), None)
        return where if where is None or place is None else names[place] + where[len(place) :]

    now = {**facts, "first_broken": renamed(facts["first_broken"])}
    for side in (token_files.TRAIN, token_files.HELD_OUT):
        if (counts := facts[side]) is not None:
            issues = counts["issues"]
            examples = {kind: renamed(example) for kind, example in issues["examples"].items()}
            now[side] = {
                **counts,
                "issues": {**issues, "first": renamed(issues["first"]), "examples": examples},
                "sources": [{**source, "name": corpora[source["number"]].name} for source in counts["sources"]],
            }
    return now

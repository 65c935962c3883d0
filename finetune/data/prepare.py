"""From a recipe to rows: read, normalise, tokenise, pack, each step kept in the cache under its own key."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from finetune.config.recipe_schema import Recipe, Source
from finetune.data import data_report
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.chat.chat_templates import find_template
from finetune.data.class_labels import ClassList, KnownClasses
from finetune.data.prepared_cache import Cache, Entry, NotPreparedError
from finetune.data.progress_bar import documents_bar
from finetune.data.rows import packed_rows
from finetune.data.rows.packed_rows import TokenRows
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.corpus import Corpus, Rules, held_out_digests, label_places, open_source
from finetune.data.sources.readers import LABELLED, Learned
from finetune.data.text_issues import Finding, findings
from finetune.data.tokenization import token_files, tokenizer
from finetune.data.tokenization.memmap import Int64s, map_array
from finetune.data.tokenization.tokenizer import Encoder, load_tokenizer, train_tokenizer
from finetune.utils.atomic_files import digest_of
from finetune.utils.errors import DataError

_HELD = "held.npy"
# Documents of a source that an estimate reads.
_SAMPLED = 1000
# Counts of a `SplitReport` that come from making rows.
_OF_ROWS = ("rows", "over_long", "truncated", "dropped", "remainder_rows", "labels_cut")


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
    report: data_report.DataReport
    digest: str
    """Digest of everything that shaped the training rows (the validation rows if there are no others)."""
    contents: dict[str, str]
    """Digests of each source, by its key, and of the tokenizer."""


@dataclass(frozen=True)
class _Tokens:
    """A token folder."""

    corpora: Sequence[Corpus]
    folder: Path
    facts: dict[str, Any]
    digest: str


@dataclass(frozen=True)
class _Side:
    """One side of a token folder, packed."""

    tokens: _Tokens
    name: str
    file: token_files.TokenFile
    packed: Entry
    digest: str


def prepare_data(
    recipe: Recipe,
    learned: Learned = "tokens",
    *,
    known: KnownClasses | None = None,
    longest: Callable[[], int | None] = lambda: None,
    quiet: bool = False,
) -> PreparedData:
    """Prepares the recipe's data, or finds it prepared.

    Any number of processes may call this at once: one works, the others wait and then read. Call it before
    there is a process group, so that nobody waits inside a collective.

    Args:
        known: The classes of the pretrained classifier that the recipe starts from, if it does.
        longest: Returns the tokens of the longest row that the model takes, None if that is not known; for advice.
        quiet: Show no progress and do not say when this process waits.

    Raises:
        DataError: If data or tokenizer cannot be used as the recipe says.
    """
    preparation = _Preparation(recipe, learned, known, longest, quiet)
    try:
        return preparation.run()
    except NotPreparedError as error:
        error.rows = preparation.estimate_rows()
        raise


class _Preparation:
    """The steps for one recipe, with what they share."""

    def __init__(
        self,
        recipe: Recipe,
        learned: Learned,
        known: KnownClasses | None,
        longest: Callable[[], int | None],
        quiet: bool,
    ) -> None:
        self._recipe, self._data, self._chat = recipe, recipe.data, recipe.chat
        self._learned: Learned = learned
        self._labelled, self._known, self._longest, self._quiet = learned in LABELLED, known, longest, quiet
        self._paired = any(source.pair_field is not None for source in (*recipe.data.train, *recipe.data.validation))
        self._cache = Cache(Path(recipe.data.cache_dir), quiet=quiet)
        self._encoder: Encoder | ChatEncoder | None = None
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
        if self._learned == "target" and not self._paired:
            raise DataError("A target is learned for each text: name its column in each source as `pair_field`.")
        train_corpora = self._train_corpora = self._open("train")
        train_rules = self._rules(data.validation_fraction if data.train and not data.validation else 0.0)
        self._tokenizer = self._find_tokenizer(train_corpora, train_rules)
        self._num_ids = tokenizer.num_ids(self._tokenizer)
        self._identity = tokenizer.tokenizer_identity(self._tokenizer)
        self._encoder = self._find_encoder()
        self._wrapping, self._target_wrapping = tokenizer.Wrapping(), None
        if self._learned != "tokens":
            pair = self._paired and self._learned != "target"
            self._wrapping = tokenizer.wrapping_of(self._tokenizer, pair=pair)
        if self._learned == "target":
            self._target_wrapping = tokenizer.target_wrapping_of(self._tokenizer)

        sides: dict[str, _Side] = {}
        validation_corpora = self._open("validation")
        if data.train:
            tokens = self._tokenise(train_corpora, train_rules)
            if tokens.facts[token_files.TRAIN] is None:
                raise DataError(
                    "All documents of data.train are held out for validation (data.validation_fraction is "
                    f"{data.validation_fraction:g}, the share of them that is), and none is left to learn from. Lower "
                    "data.validation_fraction, or add documents."
                )
            sides["train"] = self._pack(tokens, token_files.TRAIN)
            if tokens.facts[token_files.HELD_OUT] is not None:
                sides["validation"] = self._pack(tokens, token_files.HELD_OUT)
        if data.validation:
            tokens = self._tokenise(validation_corpora, self._rules(0.0))
            sides["validation"] = self._pack(tokens, token_files.TRAIN)

        first, corpora = next(iter(sides.values())), (*train_corpora, *validation_corpora)
        classes = None
        if self._labelled and self._learned != "number":
            known = [self._known] if self._known is not None else []
            named = [corpus for corpus in corpora if corpus.fields.classes]
            known += [KnownClasses(corpus.fields.classes, corpus.name) for corpus in named[:1]]
            places = label_places(first.tokens.corpora)
            classes = ClassList.of(first.tokens.facts["labels"], self._recipe.task.num_labels, known, places)
        rows = {name: self._rows(side, classes) for name, side in sides.items()}
        for name in rows:
            # What is held out may be too little.
            if len(rows[name]) == 0 and (name == "train" or data.validation):
                raise DataError(f"data.{name}: its documents fill no row of {self._no_row()}")
        reports = {name: self._report(side, rows[name], classes, sides.get("train")) for name, side in sides.items()}
        report = data_report.DataReport(
            sequence_length=data.sequence_length,
            packing=data.packing,
            vocabulary=self._num_ids,
            train=reports.get("train"),
            validation=reports.get("validation"),
            notes=classes.notes() if classes else (),
            too_long=self._room_advice() if any("too long" in str(s.left_out()) for s in reports.values()) else "",
            seconds=time.monotonic() - began,
            reused=self._reused,
        )
        data_report.check_bounds(report, self._recipe.checks, labelled=self._labelled)
        return PreparedData(
            train=rows.get("train"),
            validation=rows.get("validation") or None,
            tokenizer=self._tokenizer,
            num_labels=classes.count if classes else None,
            label_names=classes.names if classes else (),
            report=report,
            digest=_digest(first, classes),
            contents={corpus.fields.source: digest_of(corpus.content) for corpus in corpora}
            | {"the tokenizer": digest_of(self._identity)},
        )

    def _room_advice(self) -> str:
        """What to change where documents are too long: never to more than the model takes, or to what is so already."""
        data, longest = self._data, self._longest()
        advice = []
        if longest is None or data.sequence_length < longest:
            most = "" if longest is None else f", of {longest} that the model takes"
            advice.append(f"raise data.sequence_length ({data.sequence_length}{most})")
        if self._chat is not None:
            shorter = {"drop": "cut_left", "cut_left": "cut_right"}.get(self._chat.too_long)
            advice += [f"set chat.too_long={shorter}"] if shorter is not None else []
        else:
            advice.append(f"set data.long_documents={'truncate' if self._learned == 'target' else 'split'}")
        return " or ".join(advice) or "cut them into shorter ones"

    def estimate_rows(self) -> int:
        """Estimates the training rows from each source's first documents; without a tokenizer, a token is 3 bytes."""
        data, rows, encoder = self._data, 0.0, self._encoder
        for corpus in self._train_corpora:
            documents = corpus.documents()
            texts = [document.text.encode() for document in itertools.islice(documents, _SAMPLED)]
            if corpus.size and len(texts) == _SAMPLED:
                count: float = max(_SAMPLED, _SAMPLED * corpus.size / max(1, corpus.meter.done))
            else:
                count = corpus.source.sample or len(texts) + sum(1 for _ in documents)
            if data.packing == "padded":
                rows += count * corpus.source.weight
                continue
            lengths: Iterable[float]
            if isinstance(encoder, ChatEncoder):
                lengths = [encoder.encode(text, corpus.name).ids.size for text in texts]
            else:
                lengths = [len(text) / 3 for text in texts] if encoder is None else encoder.encode(texts).lengths
            # Packed rows are filled to some 95 %.
            cut = data.packing == "documents" and data.long_documents != "split"
            longest = data.sequence_length if cut else float("inf")
            each = sum(min(length, longest) for length in lengths) / max(1, len(texts))
            each /= data.sequence_length * (0.95 if data.packing == "documents" else 1.0)
            rows += count * corpus.source.weight * each
        return round(rows if data.validation else rows * (1 - data.validation_fraction))

    def _no_row(self) -> str:
        """The end of a sentence on documents that make no row: what decides it, and what to change."""
        data, why, advice = self._data, f"packing {self._data.packing}", "Add documents"
        if data.packing == "wrapped":
            why, advice = f"{why}, remainder {data.remainder}", f"{advice}, or lower data.sequence_length"
        elif not self._labelled:
            why = f"{why}, long_documents {data.long_documents}"
            if data.long_documents == "drop":
                advice = "Add shorter documents, or raise data.sequence_length"
        return f"{data.sequence_length} tokens ({why}). {advice}."

    def _open(self, side: str) -> list[Corpus]:
        corpora = []
        sources: tuple[Source, ...] = getattr(self._data, side)
        for number, source in enumerate(sources):
            form, key = None, f"data.{side}.{number}"
            if self._chat is not None:
                named = (source.format, source.fields, self._chat.roles, source.text_field)
                form = RecordForm(*named, strip=self._data.strip, tolerance=self._tolerance, source=key)
            corpora.append(open_source(source, self._learned, form=form, key=key))
        return corpora

    def _rules(self, held_out: float) -> Rules:
        if self._chat is not None:
            # What is hashed and kept is JSON, and what is said in it stays as it is.
            return Rules(False, False, held_out)
        return Rules(self._data.strip, self._data.lowercase, held_out, self._learned)

    def _key(self, corpora: Sequence[Corpus], rules: Rules) -> dict[str, Any]:
        """Lists all that shapes the texts of some sources."""
        key = {
            "format": token_files.FORMAT_VERSION,
            "sources": [corpus.fingerprint for corpus in corpora],
            "rules": [rules.strip, rules.lowercase, rules.held_out, rules.learned in LABELLED],
        }
        return {**key, "split": "by class"} if rules.by_class else key

    def _entry(self, name: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        entry = self._cache.entry(name, build)
        self._reused = self._reused and entry.reused
        return entry

    def _held(self, corpora: Sequence[Corpus], rules: Rules) -> npt.NDArray[np.uint64] | None:
        """Finds what is held out, where a document's own hash does not say it."""
        if not rules.by_class:
            return None

        def build(folder: Path) -> dict[str, Any]:
            digests = held_out_digests(corpora, rules)
            np.save(folder / _HELD, digests, allow_pickle=False)
            return {"count": int(digests.size)}

        entry = self._entry(f"held-{digest_of(self._key(corpora, rules))}", build)
        return map_array(entry.folder / _HELD, np.uint64) if entry.facts["count"] else np.array([], np.uint64)

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

        key = {"texts": self._key(corpora, rules), "vocab_size": vocab_size, "trainer": tokenizer.TRAINER_VERSION}
        entry = self._entry(f"tokenizer-{digest_of(key)}", build)
        return AutoTokenizer.from_pretrained(str(entry.folder), trust_remote_code=False)

    def _find_encoder(self) -> Encoder | ChatEncoder:
        if self._chat is None:
            return Encoder(self._tokenizer, self._learned, num_workers=self._data.num_workers, pairs=self._paired)
        template = find_template(self._tokenizer, self._chat.template, self._chat.template_args)
        if self._chat.template is not None:
            # What is trained is what the saved tokenizer writes.
            self._tokenizer.chat_template = template.text
        return ChatEncoder(
            self._tokenizer,
            template,
            self._chat,
            row_length=self._data.sequence_length,
            around=self._around(),
            tolerance=self._tolerance,
        )

    def _around(self) -> tuple[int | None, int | None]:
        """Tokens that go before and behind a document of plain text."""
        if self._labelled or self._learned == "target":
            # Special tokens go around the text when a batch is built, behind any truncation.
            return None, None
        bos = self._tokenizer.bos_token_id if self._data.add_bos else None
        eos = self._tokenizer.eos_token_id if self._data.add_eos else None
        return bos, eos

    def _tokenise(self, corpora: Sequence[Corpus], rules: Rules) -> _Tokens:
        # A template writes what goes around a conversation.
        bos, eos = self._around() if self._chat is None else (None, None)
        held = self._held(corpora, rules)
        places = [location for corpus in corpora for location in corpus.places]

        assert self._encoder is not None
        encode_all = self._encoder.encode_all

        def build(folder: Path) -> dict[str, Any]:
            self._tolerance.restore({}, None)  # training a tokenizer has read the same records
            with documents_bar("tokenising", [corpus.size for corpus in corpora], quiet=self._quiet) as bar:
                counts = token_files.write_tokens(
                    folder,
                    corpora,
                    rules,
                    encode_all,
                    num_ids=self._num_ids,
                    around=(bos, eos),
                    restore=partial(tokenizer.restore_text, self._tokenizer),
                    tolerance=self._tolerance,
                    bar=bar,
                    held_digests=held,
                )
            broken = {"broken": dict(self._tolerance.counts), "first_broken": self._tolerance.first}
            return {**counts, **broken, "places": places}

        key: dict[str, Any] = {"texts": self._key(corpora, rules), "bos": bos, "eos": eos, "tokenizer": self._identity}
        if isinstance(self._encoder, ChatEncoder):
            key["chat"] = self._encoder.key(self._identity)
        digest = digest_of(key)
        entry = self._entry(f"tokens-{digest}", build)
        return _Tokens(corpora, entry.folder, _in_places(places, entry.facts), digest)

    def _pack(self, tokens: _Tokens, side: str) -> _Side:
        data = self._data
        around = self._target_wrapping
        special = max(self._wrapping.size, around.size if around is not None else 0)
        room = data.sequence_length - special
        if room < 1:
            raise DataError(
                f"data.sequence_length is {data.sequence_length}, which the {special} special tokens of this tokenizer "
                "fill alone. Raise it."
            )
        key = {
            "tokens": tokens.digest,
            "side": side,
            "packing": data.packing,
            "labelled": self._labelled,
            "room": room,
            "row_length": data.sequence_length,
            "long_documents": None if data.packing == "wrapped" or self._labelled else data.long_documents,
            "remainder": data.remainder if data.packing == "wrapped" else None,
        }
        if around is not None:
            key["around"] = [self._wrapping, around]
        file = token_files.TokenFile(tokens.folder, side, tokens.facts["dtype"])

        def build(folder: Path) -> dict[str, Any]:
            if around is not None:
                assert file.firsts is not None
                rooms = (data.sequence_length - self._wrapping.size, data.sequence_length - around.size)
                packed = packed_rows.pad_pairs(file.offsets, file.firsts, rooms, drop=data.long_documents == "drop")
            elif self._labelled:
                packed = packed_rows.pad_documents(file.offsets, room, "truncate", with_targets=False)
            elif data.packing == "wrapped":
                keep = data.remainder == "keep"
                packed = packed_rows.wrap_stream(file.tokens.size, data.sequence_length, keep_remainder=keep)
            elif data.packing == "padded":
                packed = packed_rows.pad_documents(file.offsets, data.sequence_length, data.long_documents)
            else:
                packed = packed_rows.pack_documents(file.offsets, data.sequence_length, data.long_documents)
            return packed_rows.save_rows(packed, folder, file.mask, file.token_labels)

        digest = digest_of(key)
        return _Side(tokens, side, file, self._entry(f"rows-{digest}", build), digest)

    def _rows(self, side: _Side, classes: ClassList | None) -> TokenRows:
        file = side.file
        numbers: Int64s | npt.NDArray[np.float32] | None = None
        label_classes: Int64s | None = None
        if classes is not None and file.token_labels is not None:
            labels = side.tokens.facts["labels"]
            label_classes = np.append(classes.renumber(np.arange(len(labels)), labels), packed_rows.IGNORED)
        elif classes is not None:
            assert file.labels is not None
            numbers = classes.renumber(file.labels, side.tokens.facts["labels"])
        elif self._learned == "number":
            assert file.labels is not None
            numbers = np.array(side.tokens.facts["labels"], np.float32)[file.labels]
        pairs = None
        if file.firsts is not None and self._learned != "target":
            # A row is one document of a classifier.
            pairs = np.stack([file.firsts, np.diff(file.offsets) - file.firsts], axis=1)
        targets = side.packed.folder / packed_rows.ROW_TARGETS
        return TokenRows(
            tokens=file.tokens,
            packed=packed_rows.load_rows(side.packed.folder),
            row_length=self._data.sequence_length,
            padding_id=tokenizer.padding_id(self._tokenizer),
            restarts=self._data.packing == "documents",
            fixed=self._data.packing != "padded",
            classes=numbers,
            wrapping=self._wrapping,
            target_wrapping=self._target_wrapping,
            pairs=pairs,
            mask=file.mask,
            row_targets=map_array(targets) if targets.exists() else None,
            token_labels=file.token_labels,
            label_classes=label_classes,
        )

    def _report(
        self, side: _Side, rows: TokenRows, classes: ClassList | None, train: _Side | None
    ) -> data_report.SplitReport:
        facts, corpora = side.tokens.facts, side.tokens.corpora
        counts, made = facts[side.name], side.packed.facts
        overlap = 0
        if train is not None and train.tokens is not side.tokens:
            overlap = int(np.isin(side.file.digests, train.file.digests).sum())
        of_classes: dict[str, int] = {}
        if classes is not None:
            of_classes = dict(zip(classes.names, rows.class_counts(classes.count).tolist(), strict=True))
        numbers = None
        if self._learned == "number" and rows.classes is not None:
            learned = rows.classes.astype(np.float64)
            figures = (learned.min(), learned.mean(), learned.max(), learned.std())
            numbers = data_report.TargetReport(*map(float, figures))
        text_findings = findings(counts["issues"])
        chat, eos = None, self._tokenizer.eos_token_id
        wants_end = self._learned == "target" or (not self._labelled and (self._data.add_eos or self._chat is not None))
        total, ended = counts["documents"], 0
        if counts["chat"]:
            chat_counts, name_of = counts["chat"], self._tokenizer.convert_ids_to_tokens
            total, ended = chat_counts["examples"], chat_counts["ended"]
            chat = data_report.ChatReport(
                supervised_share=chat_counts["supervised"] / chat_counts["tokens"] if chat_counts["tokens"] else 0.0,
                ended_share=ended / total if total else 0.0,
                ends={str(name_of(int(token))): count for token, count in counts["ends"].items()},
                **{
                    field.name: chat_counts[field.name]
                    for field in fields(data_report.ChatReport)
                    if field.name in chat_counts
                },
            )
        elif wants_end and eos is not None:
            # A target has its end even where it was truncated, as tokenizers do it.
            ended = total if self._learned == "target" else total - made["truncated"]
        if wants_end and eos is None and ended < total:
            text_findings = (
                Finding(data_report.NO_END, total - ended, total, counts["issues"]["first"]),
                *text_findings,
            )
        around = made["rows"] * self._wrapping.size
        places = made["rows"] * self._data.sequence_length
        targets = made["targets"] + (0 if self._learned == "tags" else around)
        if self._target_wrapping is not None:
            around += made["rows"] * self._target_wrapping.size
            places *= 2
            targets = rows.num_targets(np.arange(len(rows)))
        # Records of a source belong to neither side before they are read: said once, with the training side.
        own = side.name == token_files.TRAIN
        # What was left out on purpose has no tokens either.
        left_out = chat.unsupervised + chat.too_long + chat.refused if chat else 0
        sources = []
        for source in counts["sources"]:
            corpus, unread = corpora[source["number"]], tuple(source["unread"])
            shown = (corpus.name, source["documents"], source["tokens"], source["format"], unread, corpus.files)
            sources.append(data_report.SourceReport(*shown))
        return data_report.SplitReport(
            targets=targets,
            useful_share=(made["pairs"] + around) / places if places else 0.0,
            empty=counts["empty"] + made["empty"] - left_out,
            sources=tuple(sources),
            overlap=overlap,
            broken=facts["broken"] if own else {},
            first_broken=facts["first_broken"] if own else None,
            chat=chat,
            ended_share=ended / total if total else 0.0,
            findings=text_findings,
            classes=of_classes,
            numbers=numbers,
            **{name: counts[name] for name in ("documents", "tokens", "duplicates")},
            **{name: made.get(name, 0) for name in _OF_ROWS},
        )


def _digest(first: _Side, classes: ClassList | None) -> str:
    """Digest of the rows, and of the classes' numbers where the labels alone do not give these."""
    if classes is None or classes.known is None:
        return first.digest
    labels = first.tokens.facts["labels"]
    plain = {label: n for n, label in enumerate(sorted(map(str, labels)))}
    numbers = {str(label): classes.number_of[label] for label in labels}
    given = {label: int(label) for label in numbers if label.isdecimal()}
    return first.digest if numbers in (plain, given) else digest_of({"rows": first.digest, "classes": numbers})


def _in_places(places: Sequence[str], facts: dict[str, Any]) -> dict[str, Any]:
    """Facts about tokens with the sources' present places: the same contents may have been tokenised from elsewhere."""
    names = dict(zip(facts["places"], places, strict=True))

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: renamed(inner) for key, inner in value.items()}
        prefix = next((name for name in names if isinstance(value, str) and value.startswith(f"{name},")), None)
        return value if prefix is None else names[prefix] + value[len(prefix) :]

    now = {**facts, "first_broken": renamed(facts["first_broken"])}
    for side in (token_files.TRAIN, token_files.HELD_OUT):
        if facts[side] is not None:
            now[side] = {**facts[side], "issues": renamed(facts[side]["issues"])}
    return now

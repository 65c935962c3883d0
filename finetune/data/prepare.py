"""From a recipe to rows: read, normalise, tokenise, pack, each step kept in the cache under its own key."""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from finetune.data.chat.preference_encoder import PreferenceEncoder
from finetune.data.class_labels import ClassList, KnownClasses
from finetune.data.prepared_cache import Cache, NotPreparedError
from finetune.data.progress_bar import documents_bar
from finetune.data.rows import packed_rows
from finetune.data.rows.kinds import documents
from finetune.data.rows.kinds.row_kind import RowKind, TokenRows
from finetune.data.sources.conversation_formats import RecordForm, Tolerance
from finetune.data.sources.corpus import Corpus, Rules, held_out_digests, label_places, open_source
from finetune.data.text_issues import Finding, findings
from finetune.data.tokenization import special_tokens, token_files, tokenizer
from finetune.data.tokenization.encoded import Facts
from finetune.data.tokenization.memmap import map_array
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
class _Request:
    """What is prepared."""

    recipe: Recipe
    kind: RowKind
    cache: Cache
    tolerance: Tolerance
    quiet: bool

    @property
    def paired(self) -> bool:
        """True if documents are pairs of texts."""
        data = self.recipe.data
        return self.recipe.chat is None and any(s.pair_field is not None for s in (*data.train, *data.validation))


@dataclass(frozen=True)
class _Reader:
    """The tokenizer, and what is made with it."""

    tokenizer: PreTrainedTokenizerBase
    encoder: Encoder | ChatEncoder | PreferenceEncoder
    around: tuple[special_tokens.Wrapping, ...]
    """Tokens around each text of a row; see `RowKind.around`."""
    identity: dict[str, Any]
    """All that decides how text becomes tokens."""


@dataclass(frozen=True)
class _Side:
    """One side of a token folder, packed."""

    corpora: Sequence[Corpus]
    facts: dict[str, Any]
    """Of the token folder."""
    name: str
    file: token_files.TokenFile
    made: dict[str, Any]
    """What was made of its documents."""
    rows: TokenRows
    """Its rows, before what is learned of documents is known."""
    digest: str


def prepare_data(
    recipe: Recipe,
    kind: RowKind = documents.KIND,
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
    began, data = time.monotonic(), recipe.data
    cache = Cache(Path(data.cache_dir), quiet=quiet)
    request = _Request(recipe, kind, cache, Tolerance(lenient=recipe.checks.max_broken > 0), quiet)
    if not data.train and not data.validation:
        raise DataError("The recipe names no documents. Name at least one source in data.train.")
    for number, source in enumerate(data.validation):
        if source.weight != 1.0:
            raise DataError(
                f"data.validation.{number}.weight is {source.weight:g}, but evaluation reads every document once. "
                "Remove the weight; `limit` reads fewer documents."
            )
    if kind.takes_pairs and not request.paired:
        raise DataError("A target is learned for each text: name its column in each source as `pair_field`.")
    train_corpora, reader = _open(request, "train"), None
    try:
        held_out = data.validation_fraction if data.train and not data.validation else 0.0
        reader = _find_reader(request, train_corpora, held_out)
        validation_corpora = _open(request, "validation")
        sides = _sides(request, reader, train_corpora, validation_corpora, held_out)
    except NotPreparedError as error:
        error.rows = _estimate_rows(recipe, train_corpora, None if reader is None else reader.encoder)
        raise

    first, corpora = next(iter(sides.values())), (*train_corpora, *validation_corpora)
    classes = None
    if kind.labels in ("class", "tag"):
        named = [corpus for corpus in corpora if corpus.fields.classes]
        of_data = [KnownClasses(corpus.fields.classes, corpus.name) for corpus in named[:1]]
        given = [*([known] if known is not None else []), *of_data]
        places = label_places(first.corpora)
        classes = ClassList.of(first.facts["labels"], recipe.task.num_labels, given, places)
    rows = {}
    for name, side in sides.items():
        rows[name] = replace(side.rows, values=kind.values(side.file.columns, side.facts["labels"], classes))
        # What is held out may be too little.
        if len(rows[name]) == 0 and (name == "train" or data.validation):
            raise DataError(f"data.{name}: its documents fill no row of {_no_row(request)}")
    reports = {
        name: _report(request, reader, side, rows[name], classes, sides.get("train")) for name, side in sides.items()
    }
    too_long = any("too long" in str(split.left_out()) for split in reports.values())
    report = data_report.DataReport(
        sequence_length=data.sequence_length,
        packing=data.packing,
        vocabulary=tokenizer.num_ids(reader.tokenizer),
        train=reports.get("train"),
        validation=reports.get("validation"),
        notes=classes.notes() if classes else (),
        too_long=_room_advice(request, longest()) if too_long else "",
        seconds=time.monotonic() - began,
        reused=cache.reused,
    )
    data_report.check_bounds(report, recipe.checks, labelled=bool(kind.labels))
    return PreparedData(
        train=rows.get("train"),
        validation=rows.get("validation") or None,
        tokenizer=reader.tokenizer,
        num_labels=classes.count if classes else None,
        label_names=classes.names if classes else (),
        report=report,
        digest=_digest(first, classes),
        contents={corpus.fields.source: digest_of(corpus.content) for corpus in corpora}
        | {"the tokenizer": digest_of(reader.identity)},
    )


def _sides(
    request: _Request, reader: _Reader, train: Sequence[Corpus], validation: Sequence[Corpus], held_out: float
) -> dict[str, _Side]:
    """The documents of training and of validation, tokenised and packed."""
    sides: dict[str, _Side] = {}
    if train:
        sides = _tokenise(request, reader, train, held_out)
        if token_files.TRAIN not in sides:
            raise DataError(
                "All documents of data.train are held out for validation (data.validation_fraction is "
                f"{held_out:g}, the share of them that is), and none is left to learn from. Lower "
                "data.validation_fraction, or add documents."
            )
        if token_files.HELD_OUT in sides:
            sides["validation"] = sides.pop(token_files.HELD_OUT)
    if validation:
        sides["validation"] = _tokenise(request, reader, validation, 0.0)[token_files.TRAIN]
    return sides


def _room_advice(request: _Request, longest: int | None) -> str:
    """What to change where documents are too long: never to more than the model takes, or to what is so already."""
    data, chat, advice = request.recipe.data, request.recipe.chat, []
    if longest is None or data.sequence_length < longest:
        most = "" if longest is None else f", of {longest} that the model takes"
        advice.append(f"raise data.sequence_length ({data.sequence_length}{most})")
    if chat is not None:
        shorter = {"drop": "cut_left", "cut_left": "cut_right"}.get(chat.too_long)
        advice += [f"set chat.too_long={shorter}"] if shorter is not None else []
    else:
        advice.append(f"set data.long_documents={'truncate' if request.kind.reads_source else 'split'}")
    return " or ".join(advice) or "cut them into shorter ones"


def _no_row(request: _Request) -> str:
    """The end of a sentence on documents that make no row: what decides it, and what to change."""
    data = request.recipe.data
    why, advice = f"packing {data.packing}", "Add documents"
    if data.packing == "wrapped":
        why, advice = f"{why}, remainder {data.remainder}", f"{advice}, or lower data.sequence_length"
    elif not request.kind.labels:
        why = f"{why}, long_documents {data.long_documents}"
        if data.long_documents == "drop":
            advice = "Add shorter documents, or raise data.sequence_length"
    return f"{data.sequence_length} tokens ({why}). {advice}."


def _estimate_rows(
    recipe: Recipe, corpora: Sequence[Corpus], encoder: Encoder | ChatEncoder | PreferenceEncoder | None
) -> int:
    """Estimates the training rows from each source's first documents; without a tokenizer, a token is 3 bytes."""
    data, rows = recipe.data, 0.0
    for corpus in corpora:
        unread = corpus.documents()
        texts = [document.text.encode() for document in itertools.islice(unread, _SAMPLED)]
        if corpus.size and len(texts) == _SAMPLED:
            count: float = max(_SAMPLED, _SAMPLED * corpus.size / max(1, corpus.meter.done))
        else:
            count = corpus.source.sample or len(texts) + sum(1 for _ in unread)
        each = 1.0
        if data.packing != "padded" and not isinstance(encoder, PreferenceEncoder):
            lengths: Sequence[float] = [len(text) / 3 for text in texts]
            if isinstance(encoder, ChatEncoder):
                lengths = [encoder.encode(text, corpus.name).ids.size for text in texts]
            elif encoder is not None:
                lengths = encoder.encode(texts).lengths.tolist()
            # Packed rows are filled to some 95 %.
            cut = data.packing == "documents" and data.long_documents != "split"
            longest = data.sequence_length if cut else float("inf")
            each = sum(min(length, longest) for length in lengths) / max(1, len(texts))
            each /= data.sequence_length * (0.95 if data.packing == "documents" else 1.0)
        rows += count * corpus.source.weight * each
    return round(rows if data.validation else rows * (1 - data.validation_fraction))


def _open(request: _Request, side: str) -> list[Corpus]:
    data, chat, corpora = request.recipe.data, request.recipe.chat, []
    sources: tuple[Source, ...] = getattr(data, side)
    for number, source in enumerate(sources):
        key, roles = f"data.{side}.{number}", {} if chat is None else chat.roles
        named = (source.format, source.fields, roles, source.text_field)
        form: Any = RecordForm(*named, strip=data.strip, tolerance=request.tolerance, source=key)
        if request.kind.form is not None:
            form = request.kind.form(form, request.recipe)
        elif chat is None:
            form = None
        corpora.append(open_source(source, request.kind.fields(source, form=form, source=key)))
    return corpora


def _rules(request: _Request, held_out: float) -> Rules:
    data, kind = request.recipe.data, request.kind
    if request.recipe.chat is not None or kind.form is not None:
        # What is hashed and kept is JSON, and what is said in it stays as it is.
        return Rules(False, False, held_out)
    return Rules(data.strip, data.lowercase, held_out, by_class=kind.labels == "class" and held_out > 0)


def _key(request: _Request, corpora: Sequence[Corpus], rules: Rules) -> dict[str, Any]:
    """Lists all that shapes the texts of some sources."""
    key = {
        "format": token_files.FORMAT_VERSION,
        "sources": [corpus.fingerprint for corpus in corpora],
        "rules": [rules.strip, rules.lowercase, rules.held_out, bool(request.kind.labels)],
    }
    return {**key, "split": "by class"} if rules.by_class else key


def _held(request: _Request, corpora: Sequence[Corpus], rules: Rules) -> npt.NDArray[np.uint64] | None:
    """Finds what is held out, where a document's own hash does not say it."""
    if not rules.by_class:
        return None

    def build(folder: Path) -> dict[str, Any]:
        digests = held_out_digests(corpora, rules)
        np.save(folder / _HELD, digests, allow_pickle=False)
        return {"count": int(digests.size)}

    entry = request.cache.entry(f"held-{digest_of(_key(request, corpora, rules))}", build)
    return map_array(entry.folder / _HELD, np.uint64) if entry.facts["count"] else np.array([], np.uint64)


def _find_tokenizer(request: _Request, corpora: Sequence[Corpus], held_out: float) -> PreTrainedTokenizerBase:
    vocab_size = request.recipe.tokenizer.vocab_size
    if vocab_size is None:
        return load_tokenizer(request.recipe)
    if not corpora:
        raise DataError(
            "tokenizer.vocab_size trains a tokenizer on data.train, which is empty. Name a source in data.train, "
            "or an existing tokenizer as tokenizer.name."
        )
    rules = _rules(request, held_out)
    held = _held(request, corpora, rules)

    def build(folder: Path) -> dict[str, Any]:
        with documents_bar("training the tokenizer", [c.size for c in corpora], quiet=request.quiet) as bar:
            trained = train_tokenizer(token_files.training_texts(corpora, rules, held, bar), vocab_size)
        trained.save_pretrained(str(folder))
        return {}

    texts = _key(request, corpora, rules)
    key = {"texts": texts, "vocab_size": vocab_size, "trainer": tokenizer.TRAINER_VERSION}
    entry = request.cache.entry(f"tokenizer-{digest_of(key)}", build)
    return AutoTokenizer.from_pretrained(str(entry.folder), trust_remote_code=False)


def _find_reader(request: _Request, corpora: Sequence[Corpus], held_out: float) -> _Reader:
    """Loads the tokenizer, or trains it on some sources."""
    found, data, chat = _find_tokenizer(request, corpora, held_out), request.recipe.data, request.recipe.chat
    facts = (request.kind.around(found, request.paired), tokenizer.tokenizer_identity(found))
    # Where special tokens go around texts, they do when a batch is built, behind any truncation.
    bos = found.bos_token_id if data.add_bos and not facts[0] else None
    eos = found.eos_token_id if data.add_eos and not facts[0] else None
    if chat is None:
        options: dict[str, Any] = {"num_workers": data.num_workers, "paired": request.paired, "around": (bos, eos)}
        return _Reader(found, _of_kind(request, found, Encoder(found, request.kind.encode, **options)), *facts)
    template = find_template(found, chat.template, chat.template_args)
    if chat.template is not None:
        # What is trained is what the saved tokenizer writes.
        found.chat_template = template.text
    options = {"row_length": _row_length(request), "around": (bos, eos), "tolerance": request.tolerance}
    return _Reader(found, _of_kind(request, found, ChatEncoder(found, template, chat, **options)), *facts)


def _of_kind(
    request: _Request, tokenizer: PreTrainedTokenizerBase, encoder: Encoder | ChatEncoder
) -> Encoder | ChatEncoder | PreferenceEncoder:
    if not request.kind.judged:
        return encoder
    margins, length = "margins" in request.kind.of_documents, _row_length(request)
    return PreferenceEncoder(encoder, tokenizer, length, margins=margins, tolerance=request.tolerance)


def _row_length(request: _Request) -> int:
    """The most pairs of an input and its target of a row, which has a token more; of scored answers as many tokens."""
    return request.recipe.data.sequence_length - (request.kind.judged and not request.kind.writes_text)


def _tokenise(request: _Request, reader: _Reader, corpora: Sequence[Corpus], held_out: float) -> dict[str, _Side]:
    """Tokenises some sources, and makes rows of each side that has documents."""
    rules, tolerance, encoder = _rules(request, held_out), request.tolerance, reader.encoder
    held = _held(request, corpora, rules)
    places = [location for corpus in corpora for location in corpus.places]
    columns = token_files.Columns(request.kind.of_documents, request.kind.of_tokens)

    def build(folder: Path) -> dict[str, Any]:
        tolerance.restore({}, None)  # training a tokenizer has read the same records
        with documents_bar("tokenising", [corpus.size for corpus in corpora], quiet=request.quiet) as bar:
            counts = token_files.write_tokens(
                folder,
                corpora,
                rules,
                encoder.encode_all,
                columns=columns,
                num_ids=tokenizer.num_ids(reader.tokenizer),
                restore=partial(tokenizer.restore_text, reader.tokenizer),
                tolerance=tolerance,
                bar=bar,
                held_digests=held,
            )
        broken = {"broken": dict(tolerance.counts), "first_broken": tolerance.first}
        return {**counts, **broken, "places": places}

    key = {"texts": _key(request, corpora, rules), "tokenizer": reader.identity, **encoder.key(reader.identity)}
    digest = digest_of(key)
    entry = request.cache.entry(f"tokens-{digest}", build)
    facts = _in_places(places, entry.facts)
    files = {
        side: token_files.TokenFile(entry.folder, side, facts["dtype"], columns)
        for side in (token_files.TRAIN, token_files.HELD_OUT)
        if facts[side] is not None
    }
    return {side: _pack(request, reader, corpora, facts, side, file, digest) for side, file in files.items()}


def _pack(
    request: _Request,
    reader: _Reader,
    corpora: Sequence[Corpus],
    facts: dict[str, Any],
    side: str,
    file: token_files.TokenFile,
    tokens: str,
) -> _Side:
    """Makes rows of one side of a token folder, of which `tokens` is the digest."""
    data, kind = request.recipe.data, request.kind
    around, length = reader.around, data.sequence_length
    rooms = [length - of_text.size for of_text in around]
    room = min(rooms, default=length)
    if room < 1:
        raise DataError(
            f"data.sequence_length is {length}, which the {length - room} special tokens of this tokenizer fill alone. "
            "Raise it."
        )
    key: dict[str, Any] = {
        "tokens": tokens,
        "side": side,
        "packing": data.packing,
        "labelled": bool(kind.labels),
        "room": room,
        "row_length": length,
        "long_documents": None if data.packing == "wrapped" or kind.labels else data.long_documents,
        "remainder": data.remainder if data.packing == "wrapped" else None,
    }
    if len(around) > 1:
        key["around"] = around

    def build(folder: Path) -> dict[str, Any]:
        packed = kind.pack(file.columns, data, rooms)
        return packed_rows.save_rows(packed, folder, *kind.count(file.columns, packed))

    digest = digest_of(key)
    entry = request.cache.entry(f"rows-{digest}", build)
    targets = entry.folder / packed_rows.ROW_TARGETS
    rows = TokenRows(
        kind=kind,
        tokens=file.tokens,
        packed=packed_rows.load_rows(entry.folder),
        columns=file.columns,
        row_length=length,
        padding_id=special_tokens.padding_id(reader.tokenizer),
        packing=data.packing,
        around=around,
        stored_targets=map_array(targets) if targets.exists() else None,
    )
    return _Side(corpora, facts, side, file, entry.facts, rows, digest)


def _report(
    request: _Request, reader: _Reader, side: _Side, rows: TokenRows, classes: ClassList | None, train: _Side | None
) -> data_report.SplitReport:
    kind, counts, made = request.kind, side.facts[side.name], side.made
    overlap = 0
    if train is not None and train.facts is not side.facts:
        overlap = int(np.isin(side.file.digests, train.file.digests).sum())
    text_findings, eos = findings(counts["issues"]), reader.tokenizer.eos_token_id
    recipe = request.recipe
    wants_end = not (kind.labels or kind.embeds) and (
        kind.reads_source or recipe.data.add_eos or recipe.chat is not None
    )
    chat, total, ended = None, counts["documents"], 0
    if counts["chat"]:
        name_of = reader.tokenizer.convert_ids_to_tokens
        chat = Facts(**counts["chat"])
        total, ended = chat.examples, chat.ended
        chat = replace(
            chat,
            supervised_share=chat.supervised / chat.tokens if chat.tokens else 0.0,
            ended_share=ended / total if total else 0.0,
            ends={str(name_of(int(token))): count for token, count in counts["ends"].items()},
        )
    elif wants_end and eos is not None:
        # A target has its end even where it was truncated, as tokenizers do it.
        ended = total if kind.reads_source else total - made["truncated"]
    if wants_end and eos is None and ended < total:
        text_findings = (Finding(data_report.NO_END, total - ended, total, counts["issues"]["first"]), *text_findings)
    texts = rows.packed.starts.size if kind.embeds else len(rows) * (2 if kind.judged else max(1, len(rows.around)))
    every, places = np.arange(len(rows)), texts * rows.row_length
    # Records of a source belong to neither side before they are read: said once, with the training side.
    own = side.name == token_files.TRAIN
    # What was left out on purpose has no tokens either.
    left_out = chat.unsupervised + chat.too_long + chat.refused if chat else 0
    sources = []
    for source in counts["sources"]:
        corpus, unread = side.corpora[source["number"]], tuple(source["unread"])
        shown = (corpus.name, source["documents"], source["tokens"], source["format"], unread, corpus.files)
        sources.append(data_report.SourceReport(*shown))
    return data_report.SplitReport(
        targets=rows.num_computed(every) if kind.labels in ("class", "number") else rows.num_targets(every),
        useful_share=rows.num_computed(every) / places if places else 0.0,
        empty=counts["empty"] + made["empty"] - left_out,
        sources=tuple(sources),
        overlap=overlap,
        broken=side.facts["broken"] if own else {},
        first_broken=side.facts["first_broken"] if own else None,
        chat=chat,
        ended_share=ended / total if total else 0.0,
        findings=text_findings,
        **kind.report(rows, classes.names if classes else ()),
        **{name: counts[name] for name in ("documents", "tokens", "duplicates")},
        **{name: made.get(name, 0) for name in _OF_ROWS},
    )


def _digest(first: _Side, classes: ClassList | None) -> str:
    """Digest of the rows, and of the classes' numbers where the labels alone do not give these."""
    if classes is None or classes.known is None:
        return first.digest
    labels = first.facts["labels"]
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

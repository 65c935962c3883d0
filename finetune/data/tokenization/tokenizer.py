"""The tokenizer: loaded from a directory or the hub, or trained on the training documents; and batches of its tokens.

Threads tokenise, in order: the library does without Python's lock meanwhile.
"""

import contextlib
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase

from finetune.config import recipe_paths
from finetune.config.recipe_schema import Recipe
from finetune.data.sources.corpus import Chosen
from finetune.data.sources.readers import END_OF_TEXT, Learned
from finetune.utils import json_files
from finetune.utils.errors import DataError
from finetune.utils.file_formats import format_of
from finetune.utils.platforms import cores

PADDING = "<|pad|>"
TRAINER_VERSION = 1
BATCH_DOCUMENTS = 256
BATCH_BYTES = 1 << 18
"""A tenth of a second's work: at the end the threads wait for the last one no longer than that."""
BATCHES_AHEAD = 8
"""Batches of each thread: enough to keep it busy while a shard is written, few enough to bound memory."""


Mask = npt.NDArray[np.bool_]

# Fewer beside the special ones can write no text.
_LEAST_TOKENS = 2
# No network has as many rows; written out as JSON, a larger number takes the tokenizers library gigabytes.
_MOST_IDS = 1 << 24


class Wrapping(NamedTuple):
    """Tokens that a tokenizer puts around a text, or around and between two, for classifiers: [CLS], [SEP]."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    types: tuple[int, ...] | None = None
    """Type ids of `before`, the first text, `between`, the second and `behind`, one for each text; None where the
    tokenizer has none, or there is one text."""

    @property
    def size(self) -> int:
        """Number of these tokens."""
        return len(self.before) + len(self.between) + len(self.behind)


def load_tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Loads the tokenizer that the recipe names, or the one beside its model.

    Raises:
        DataError: If there is none, or it cannot be loaded.
    """
    section, model = recipe.tokenizer, recipe.model
    name = section.name or model.name
    revision = section.revision if section.name else model.revision
    if name is None:
        raise DataError(
            "The recipe names no tokenizer, and no model that one could lie beside. Set tokenizer.name, or "
            "tokenizer.vocab_size to train one."
        )
    wrong = recipe_paths.why_not(Path(name), "tokenizer")
    if wrong is not None:
        raise DataError(f"{'tokenizer' if section.name else 'model'}.name: {wrong}")
    try:
        tokenizer = _load(name, revision, model.trust_remote_code)
    except Exception as error:  # Each tokenizer class fails in its own way; all mean that there is none to use.
        _check_files(name)
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(". :")
        raise DataError(
            f"The tokenizer '{name}' cannot be loaded: {reason}. It must be a directory with a tokenizer's "
            "files (such as tokenizer.json) or a name on the hub; correct tokenizer.name, or set tokenizer.vocab_size "
            "to train one."
        ) from error
    if damage := why_damaged(tokenizer):
        raise DataError(
            f"The tokenizer '{name}' {damage}. Copy them, correct tokenizer.name, or set tokenizer.vocab_size to train "
            "one."
        )
    return tokenizer


def why_damaged(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns what is wrong with a tokenizer that knows no text, or numbers that no network has; None for others.

    Where there are no files of one, transformers makes it by the model's type: all text would be one unknown token.
    """
    vocabulary = tokenizer.get_vocab()
    # Beside special tokens some have a blank.
    if len(vocabulary.keys() - set(tokenizer.all_special_tokens)) >= _LEAST_TOKENS:
        if (size := num_ids(tokenizer)) <= _MOST_IDS:
            return None
        return (
            f"numbers {len(vocabulary):,} tokens up to {size - 1:,}: its files (tokenizer.json or others) are damaged"
        )
    special = ", ".join(tokenizer.all_special_tokens[:3])
    return f"knows no text, only tokens such as {special}: its files (tokenizer.json, vocab.txt or others) are absent"


def _load(name: str, revision: str | None, trusted: bool) -> PreTrainedTokenizerBase:
    if Path(name).is_dir():
        files = {path.name for path in Path(name).iterdir()}
        # The form that GPT-2 was published in says nowhere which class it belongs to.
        named = files & {"tokenizer.json", "tokenizer_config.json", "config.json"}
        if {"vocab.json", "merges.txt"} <= files and not named:
            return transformers.GPT2TokenizerFast.from_pretrained(name)
    return transformers.AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trusted)


def _check_files(name: str) -> None:
    """Refuses files that are something else than their names say, and a damaged configuration: it is read as well."""
    folder = Path(name)
    kinds = (".json", ".txt", ".model", ".jinja")
    for file in sorted(path for path in folder.glob("*") if path.suffix in kinds and os.access(path, os.R_OK)):
        if file_format := format_of(file) if file.is_file() else None:
            raise DataError(f"{file} is {file_format.name}, and no part of a tokenizer. {file_format.advice}")
    file = folder / "config.json"
    if file.is_file():
        with DataError.explaining(f"{file} is no valid JSON", "It is the model's configuration; restore it."):
            json_files.read(file)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE; the same texts in the same order give the same tokenizer.

    `<|endoftext|>` opens and closes documents, `<|pad|>` pads. There can be fewer pieces than asked for,
    where the texts hold no more pairs to merge.

    Args:
        vocab_size: Pieces, with the 256 bytes and the two specials.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PADDING
    )


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the rows that a network needs for a tokenizer: one more than the largest number, whatever lies between.

    A token that stands for an image, a film or a sound needs none, as no text gives it: the one of Gemma 3 lies beyond
    the rows of its smallest networks.
    """
    media = {getattr(tokenizer, f"{medium}_token", None) for medium in ("image", "video", "audio")}
    return max((number for token, number in tokenizer.get_vocab().items() if token not in media), default=0) + 1


def tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Describes all that decides how text becomes tokens, as JSON: part of the cache's key."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        content: Any = json.loads(backend.to_str()) if isinstance(backend, Tokenizer) else None
    except Exception:  # Parts written in Python cannot be serialised.
        content = None
    if content is not None:
        # These are the state of the last call, and we never use them.
        content.update(truncation=None, padding=None)
    else:
        content = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return {"content": content, "bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}


def restore_text(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text as its tokens say it. What is lost in them (case, spaces, unknown characters) no model can learn."""
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def wrapping_of(tokenizer: PreTrainedTokenizerBase, *, pair: bool = False, target: bool = False) -> Wrapping:
    """Finds what the tokenizer itself puts before and behind a text, or around and between two, with their type ids.

    Args:
        target: True for a text that is to be written, which some tokenizers treat otherwise (mBART's language codes).

    Raises:
        DataError: If it does something else to the text as well.
    """
    probes = {"text_target": "a"} if target else {"text": "a", "text_pair": "b"} if pair else {"text": "a"}
    key = next(iter(probes))
    bare = [list(tokenizer(**{key: text}, add_special_tokens=False)["input_ids"]) for text in probes.values()]
    both = tokenizer(**probes)
    full, types = list(both["input_ids"]), both.get("token_type_ids")
    for starts in itertools.combinations(range(len(full) + 1), len(bare)):
        ends = [start + len(ids) for start, ids in zip(starts, bare, strict=True)]
        if (not pair or ends[0] <= starts[1]) and all(
            full[start:end] == ids for start, end, ids in zip(starts, ends, bare, strict=True)
        ):
            # One type for each text, however many tokens the probes have.
            kept = [*range(starts[0] + 1), *range(ends[0], starts[-1] + 1), *range(ends[-1], len(full))]
            return Wrapping(
                before=tuple(full[: starts[0]]),
                between=tuple(full[ends[0] : starts[-1]]),
                behind=tuple(full[ends[-1] :]),
                types=tuple(types[place] for place in kept) if pair and types is not None else None,
            )
    what = "texts when it pairs them, so `pair_field` cannot be used with it"
    if not pair:
        what = "a text when it adds special tokens, so its documents cannot be prepared for this task"
    raise DataError(f"The tokenizer {type(tokenizer).__name__} changes {what}. Name another as tokenizer.name.")


def target_wrapping_of(tokenizer: PreTrainedTokenizerBase) -> Wrapping:
    """Finds what the tokenizer puts before and behind a target, and adds the end of text if that is not there.

    Raises:
        DataError: If it has none, or does something else to the text as well.
    """
    wrapping, end = wrapping_of(tokenizer, target=True), tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no end-of-text token, so that no target would end, nor what "
            "is generated. Name another as tokenizer.name, or give this one an eos_token."
        )
    return wrapping if end in wrapping.behind else wrapping._replace(behind=(*wrapping.behind, end))


def truncate_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of two texts stay, of which the longer loses more.

    Source: `longest_first` of the tokenizers library, `truncate_encodings` in utils/truncation.rs.
    """
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    short, long = (short, room - short) if 2 * short <= room else (room // 2, room - room // 2)
    return (short, long) if first <= second else (long, short)


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows. Nothing is learned from it, so any will do where there is none for it."""
    return next((int(n) for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)


@dataclass
class Facts:
    """Counts of one conversation, or of several."""

    examples: int = 0
    """Conversations that are learned from."""
    tokens: int = 0
    supervised: int = 0
    """Tokens that are targets."""
    ended: int = 0
    """Examples whose last supervised token ends an answer: a special token."""
    answers: int = 0
    """Answers that are to be learned."""
    cut: int = 0
    """Conversations that lost turns or their end."""
    answers_cut: int = 0
    """Answers that lost their end, or all."""
    too_long: int = 0
    """Conversations left out because they are too long."""
    unsupervised: int = 0
    """Conversations left out because there is nothing to learn from."""
    refused: int = 0
    """Conversations that the template refuses."""
    tools_dropped: int = 0
    """Conversations whose tools the template does not write."""
    shared: int = 0
    """Answers that begin inside a token of what comes before."""
    unwritten: dict[str, int] = field(default_factory=dict)
    """Conversations with other fields of which the template does not write all, by field."""

    def add(self, other: "Facts") -> None:
        """Adds another's counts."""
        for name, value in vars(other).items():
            mine = getattr(self, name)
            setattr(self, name, dict(Counter(mine) + Counter(value)) if isinstance(value, dict) else mine + value)


@dataclass(frozen=True)
class Example:
    """A conversation as it is learned from."""

    ids: npt.NDArray[np.uint32]
    """(N,) for N tokens; empty if it is left out."""
    mask: Mask
    """(N,): which tokens are targets."""
    facts: Facts
    end: int | None = None
    """The special token that ends its last answer, if it is learned."""


@dataclass(frozen=True)
class Encoded:
    """Some documents as tokens."""

    lengths: npt.NDArray[np.uint32]
    numbers: npt.NDArray[np.uint32]
    """Tokens of all, in a row."""
    examples: list[Example] | None = None
    """The same with masks and facts, for conversations."""
    firsts: npt.NDArray[np.uint32] | None = None
    """Number of tokens of the first text of each pair."""
    words: npt.NDArray[np.int32] | None = None
    """Number of the word that begins at each token, within its document; -1 where none does. None without words."""


class Encoder:
    """Turns texts into tokens with one tokenizer, without special tokens."""

    def __init__(
        self,
        tokenizer: Any,
        learned: Learned = "tokens",
        *,
        num_workers: int | None,
        pairs: bool = False,
    ) -> None:
        """Takes a transformers tokenizer, and a number of threads; None for one a core.

        A tokenizer without a fast backend is slow but works, in one thread. Of pairs, each is the JSON of two texts,
        of which the second may be a target; where words have tags, of these.
        """
        self._tokenizer, self._pairs, self._learned = tokenizer, pairs, learned
        self._num_workers = num_workers or cores()

    @cached_property
    def _fast(self) -> Tokenizer | None:
        """Opened when it is needed: not where all is in the cache."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            with contextlib.suppress(Exception):  # parts that are written in Python cannot be copied
                return open_tokenizer(backend.to_str())
        return None

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Tokens of some UTF-8 texts."""
        decoded = [text.decode() for text in texts]
        if self._pairs:
            decoded = [segment for text in decoded for segment in (json.loads(text) if text else ("", ""))]
        if self._learned == "tags":
            return self._encode_words([json.loads(text) if text else [] for text in decoded])
        if self._fast is None:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            lists = [
                # Marian has a vocabulary for each side.
                self._tokenizer(text_target=text, **options)["input_ids"]
                if self._pairs and self._learned == "target" and number % 2
                else self._tokenizer.encode(text, **options)
                for number, text in enumerate(decoded)
            ]
        else:
            lists = [encoding.ids for encoding in self._fast.encode_batch_fast(decoded, add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in lists], np.uint32)
        numbers = np.fromiter(itertools.chain.from_iterable(lists), np.uint32, int(lengths.sum()))
        if self._pairs:
            return Encoded(lengths[::2] + lengths[1::2], numbers, firsts=lengths[::2])
        return Encoded(lengths, numbers)

    def _encode_words(self, documents: Sequence[Sequence[str]]) -> Encoded:
        """Tokens of words with a space between them, as whoever opens the model tokenizes texts.

        Words that are tokenized one by one would lose their spaces in the byte-level tokens of GPT-2 and Llama.

        Raises:
            DataError: If the tokenizer does not say which characters a token stands for.
        """
        if self._fast is None:
            raise DataError(
                f"The tokenizer {type(self._tokenizer).__name__} has no fast form (tokenizer.json), and no other says "
                "which word a token belongs to, so words cannot be tagged with it. Name another as tokenizer.name."
            )
        encodings = self._fast.encode_batch([" ".join(words) for words in documents], add_special_tokens=False)
        lengths = np.array([len(encoding.ids) for encoding in encodings], np.uint32)
        numbers = np.fromiter(itertools.chain.from_iterable(e.ids for e in encodings), np.uint32, int(lengths.sum()))
        begun = [_first_tokens(words, encoding.offsets) for words, encoding in zip(documents, encodings, strict=True)]
        return Encoded(lengths, numbers, words=np.concatenate(begun))

    def encode_all(self, batches: Iterable[Sequence[Chosen]]) -> Iterator[tuple[Sequence[Chosen], Encoded]]:
        """Encodes batches lazily and returns each with its tokens, in order whatever the number of threads."""
        num_threads = self._num_workers if self._fast is not None else 1
        threads = ThreadPoolExecutor(num_threads)
        ahead: deque[tuple[Sequence[Chosen], Future[Encoded]]] = deque()
        try:
            for batch in batches:
                ahead.append((batch, threads.submit(self.encode, [item.text for item in batch])))
                if len(ahead) > BATCHES_AHEAD * num_threads:
                    done, future = ahead.popleft()
                    yield done, future.result()
            while ahead:
                done, future = ahead.popleft()
                yield done, future.result()
        finally:
            threads.shutdown(cancel_futures=True)


def _first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.int32]:
    """The number of the word that begins at each token, or -1: (tokens,).

    A word without a token of its own begins nowhere.

    Args:
        offsets: Characters of each token, of the words with a space between them.
    """
    starts, ends = np.array(offsets, np.int64).reshape(-1, 2).T
    lengths = np.array([len(word) for word in words], np.int64)
    word_ends = np.cumsum(lengths + 1) - 1
    first = np.searchsorted(ends, word_ends - lengths, side="right")
    begun = np.flatnonzero(np.append(starts, word_ends[-1:])[first] < word_ends)[::-1]
    word_ids = np.full(len(starts), -1, np.int32)
    # Of several words in a token the first, which is written last.
    word_ids[first[begun]] = begun
    return word_ids


def open_tokenizer(definition: str) -> Tokenizer:
    """A tokenizer that reads plain text only: `<|endoftext|>` in a document is characters, not an end."""
    tokenizer = Tokenizer.from_str(definition)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def batch_documents(items: Iterable[Chosen]) -> Iterator[list[Chosen]]:
    """Cuts a stream into batches by number of documents and by size, whichever comes first."""
    batch: list[Chosen] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item.text)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch

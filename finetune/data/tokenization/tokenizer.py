"""The tokenizer: loaded from a directory or the hub, or trained on the training documents; and batches of its tokens.

Threads tokenise, in order: the library does without Python's lock meanwhile.
"""

import contextlib
import itertools
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase

from finetune.config import recipe_paths
from finetune.config.recipe_schema import Recipe
from finetune.data.sources.corpus import Chosen
from finetune.data.sources.readers import END_OF_TEXT
from finetune.data.tokenization.encoded import Encoded
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

# Fewer beside the special ones can write no text.
_LEAST_TOKENS = 2
# No network has as many rows; written out as JSON, a larger number takes the tokenizers library gigabytes.
_MOST_IDS = 1 << 24


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


class Encoder:
    """Turns texts into tokens with one tokenizer, without special tokens but those around documents."""

    def __init__(
        self,
        tokenizer: Any,
        encode: "Callable[[Encoder, list[str]], Encoded] | None" = None,
        *,
        num_workers: int | None,
        paired: bool = False,
        around: tuple[int | None, int | None] = (None, None),
    ) -> None:
        """Takes a transformers tokenizer, of which a slow one works in one thread, and a number of threads.

        Args:
            encode: Tokens of some texts; left out, of each text, or pair of texts.
            num_workers: None for one a core.
            paired: Whether texts are pairs.
            around: Tokens before and behind each document.
        """
        self._tokenizer, self.around = tokenizer, around
        self._encode = encode or (Encoder.encode_pairs if paired else Encoder.encode_texts)
        self._num_workers = num_workers or cores()

    @cached_property
    def _fast(self) -> Tokenizer | None:
        """Opened when it is needed: not where all is in the cache."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            with contextlib.suppress(Exception):  # parts that are written in Python cannot be copied
                return open_tokenizer(backend.to_str())
        return None

    def key(self, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
        """Everything beside the tokenizer, of which it takes the identity, that shapes tokens."""
        return dict(zip(("bos", "eos"), self.around, strict=True))

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Tokens of some documents in UTF-8."""
        return self._encode(self, [text.decode() for text in texts])

    def encode_texts(self, texts: Sequence[str], *, targets: bool = False) -> Encoded:
        """Tokens of some texts.

        Args:
            targets: Every second text is a target, for which some tokenizers have a vocabulary of its own (Marian).
        """
        if self._fast is None:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            lists = [
                self._tokenizer(text_target=text, **options)["input_ids"]
                if targets and number % 2
                else self._tokenizer.encode(text, **options)
                for number, text in enumerate(texts)
            ]
        else:
            lists = [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]
        before, behind = ([] if token is None else [token] for token in self.around)
        if before or behind:
            lists = [[*before, *ids, *behind] if ids else ids for ids in lists]
        return Encoded(*_joined(lists), {})

    def encode_pairs(self, texts: Sequence[str], *, targets: bool = False) -> Encoded:
        """Tokens of pairs, each the JSON of two texts; of the first text of each there are `firsts`."""
        both = self.encode_texts([one for text in texts for one in json.loads(text or '["", ""]')], targets=targets)
        first, second = both.lengths[::2], both.lengths[1::2]
        return Encoded(first + second, both.numbers, {"firsts": first})

    def encode_words(self, texts: Sequence[str]) -> Encoded:
        """Tokens of words, of which each text is the JSON, with a space between them: as models are given texts.

        Words that are tokenized one by one would lose their spaces in the byte-level tokens of GPT-2 and Llama.

        Raises:
            DataError: If the tokenizer does not say which characters a token stands for.
        """
        if self._fast is None:
            raise DataError(
                f"The tokenizer {type(self._tokenizer).__name__} has no fast form (tokenizer.json), and no other says "
                "which word a token belongs to, so words cannot be tagged with it. Name another as tokenizer.name."
            )
        documents = [json.loads(text or "[]") for text in texts]
        encodings = self._fast.encode_batch([" ".join(words) for words in documents], add_special_tokens=False)
        begun = [_first_tokens(words, encoding.offsets) for words, encoding in zip(documents, encodings, strict=True)]
        return Encoded(*_joined([encoding.ids for encoding in encodings]), {}, words=np.concatenate(begun))

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


def _joined(lists: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The lengths of some lists, and what they hold in a row."""
    lengths = np.array([len(ids) for ids in lists], np.uint32)
    return lengths, np.fromiter(itertools.chain.from_iterable(lists), np.uint32, int(lengths.sum()))


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

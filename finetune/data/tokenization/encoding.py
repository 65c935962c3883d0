"""Batches of texts to batches of tokens, in order, by threads: the library tokenises without holding Python's lock."""

import contextlib
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from finetune.data.sources.corpus import Chosen
from finetune.utils.platforms import cores

BATCH_DOCUMENTS = 256
BATCH_BYTES = 1 << 18
"""A tenth of a second's work: at the end the threads wait for the last one no longer than that."""
BATCHES_AHEAD = 8
"""Batches of each thread: enough to keep it busy while a shard is written, few enough to bound memory."""


Mask = npt.NDArray[np.bool_]


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


class Encoder:
    """Turns texts into tokens with one tokenizer, without special tokens."""

    def __init__(self, tokenizer: Any, *, num_workers: int | None) -> None:
        """Takes a transformers tokenizer, and a number of threads; None for one a core.

        A tokenizer without a fast backend is slow but works, in one thread.
        """
        self._tokenizer = tokenizer
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
        if self._fast is None:
            options = {"add_special_tokens": False, "split_special_tokens": True}
            lists = [self._tokenizer.encode(text, **options) for text in decoded]
        else:
            lists = [found.ids for found in self._fast.encode_batch_fast(decoded, add_special_tokens=False)]
        lengths = np.array([len(ids) for ids in lists], np.uint32)
        return Encoded(lengths, np.fromiter(itertools.chain.from_iterable(lists), np.uint32, int(lengths.sum())))

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

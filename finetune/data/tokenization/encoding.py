"""Batches of texts to batches of tokens, in order, by as many processes as pay.

The processes are plain programs on pipes: they import neither torch nor the caller's script, need no
`if __name__ == "__main__"` in it, and nothing is pickled.
"""

import contextlib
import itertools
import os
import queue
import subprocess
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from finetune.data.cache import Interrupted
from finetune.data.tokenization import encode_worker

BATCH_DOCUMENTS = 256
BATCH_BYTES = 1 << 18
"""A tenth of a second's work: at the end the processes wait for the last one no longer than that."""
POOL_AFTER_BYTES = 2_000_000
"""Smaller corpora are tokenised here before processes would have started (a quarter of a second)."""
BATCHES_AHEAD = 8
"""Of each process: enough to keep it busy while a shard goes to the disk, little enough to bound memory."""

UInt32s = npt.NDArray[np.uint32]
Encoded = tuple[UInt32s, UInt32s]
Encode = Callable[[Sequence[bytes]], Encoded]
Item = TypeVar("Item")


class Encoder:
    """Turns texts into tokens with one tokenizer, without special tokens."""

    def __init__(self, tokenizer: Any, *, num_workers: int | None, pool_after_bytes: int = POOL_AFTER_BYTES) -> None:
        """Takes a transformers tokenizer; one without a fast backend is slow but works, in this process.

        Args:
            tokenizer: The tokenizer.
            num_workers: Processes; None for one a core.
            pool_after_bytes: Text that is tokenised in this process before others are started.
        """
        self._num_workers = num_workers or _cores()
        self._pool_after_bytes = pool_after_bytes
        self._definition: str | None = None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if isinstance(backend, Tokenizer):
            # Parts that are written in Python cannot be sent to another process.
            with contextlib.suppress(Exception):
                self._definition = backend.to_str()
        self._tokenizer = tokenizer

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        """Tokens of a few UTF-8 texts, in this process: how many each has, and all of them in a row."""
        return self._encode(texts)

    @cached_property
    def _encode(self) -> Encode:
        """Opened when it is needed: not where all is in the cache, nor where other processes do the work."""
        if self._definition is None:
            return lambda texts: _encode_slowly(self._tokenizer, texts)
        fast = encode_worker.open_tokenizer(self._definition)
        return lambda texts: _arrays(encode_worker.encode(fast, [text.decode() for text in texts]))

    def encode_all(
        self, batches: Iterable[Sequence[Item]], text_of: Callable[[Item], bytes]
    ) -> Iterator[tuple[Sequence[Item], Encoded]]:
        """Encodes batches lazily and returns each with its tokens, in order whatever the number of processes.

        Raises:
            DataError: If a tokenising process dies.
        """
        source = iter(batches)
        if self._num_workers > 1 and self._definition is not None:
            first, size = [], 0
            for batch in source:
                first.append(batch)
                size += sum(len(text_of(item)) for item in batch)
                if size >= self._pool_after_bytes:
                    yield from self._encode_in_pool(itertools.chain(first, source), text_of, self._definition)
                    return
            source = iter(first)
        # A thread has a heap of its own; in that of a process with so much in it the tokenizer takes a tenth longer.
        with ThreadPoolExecutor(1) as thread:
            for batch in source:
                yield batch, thread.submit(self._encode, [text_of(item) for item in batch]).result()

    def _encode_in_pool(
        self, batches: Iterator[Sequence[Item]], text_of: Callable[[Item], bytes], definition: str
    ) -> Iterator[tuple[Sequence[Item], Encoded]]:
        with contextlib.ExitStack() as stack:
            threads = stack.enter_context(ThreadPoolExecutor(self._num_workers))
            idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
            for _ in range(self._num_workers):
                worker = _Worker(definition)
                stack.callback(worker.stop)
                idle.put(worker)

            def encode(texts: Sequence[bytes]) -> Encoded:
                worker = idle.get()
                try:
                    return worker.encode(texts)
                finally:
                    idle.put(worker)

            ahead: deque[tuple[Sequence[Item], Future[Encoded]]] = deque()
            for batch in batches:
                ahead.append((batch, threads.submit(encode, [text_of(item) for item in batch])))
                if len(ahead) > BATCHES_AHEAD * self._num_workers:
                    done, future = ahead.popleft()
                    yield done, future.result()
            while ahead:
                done, future = ahead.popleft()
                yield done, future.result()


def batched(items: Iterable[Item], text_of: Callable[[Item], bytes]) -> Iterator[list[Item]]:
    """Cuts a stream into batches by number of documents and by size, whichever comes first."""
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(text_of(item))
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Worker:
    """One tokenising process."""

    def __init__(self, definition: str) -> None:
        # -P: the folder of the script must not come before installed packages.
        self._process = subprocess.Popen(
            [sys.executable, "-P", encode_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        # Sent with the first texts, by the thread that brings them: it waits until the process reads.
        self._definition: bytes | None = definition.encode("utf-8")

    def encode(self, texts: Sequence[bytes]) -> Encoded:
        if self._definition is not None:
            self._send(self._definition)
            self._definition = None
        self._send(encode_worker.join(array("I", map(len, texts)), b"".join(texts)))
        assert self._process.stdout is not None
        frame = encode_worker.read_frame(self._process.stdout)
        if frame is None:
            raise self._died()
        return _arrays(encode_worker.cut(frame))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()

    def _send(self, frame: bytes) -> None:
        assert self._process.stdin is not None
        try:
            encode_worker.write_frame(self._process.stdin, frame)
        except OSError as error:
            raise self._died() from error

    def _died(self) -> Interrupted:
        return Interrupted(
            f"A tokenising process ended with exit code {self._process.wait()}; a negative code is a signal, "
            "and -9 "
            "usually means that memory ran out. Lower data.num_workers."
        )


def _encode_slowly(tokenizer: Any, texts: Sequence[bytes]) -> Encoded:
    lists = [tokenizer.encode(text.decode(), add_special_tokens=False, split_special_tokens=True) for text in texts]
    return _arrays(encode_worker.flatten(lists))


def _arrays(found: tuple[encode_worker.Numbers, encode_worker.Numbers]) -> Encoded:
    """Lengths and tokens as NumPy has them, without a copy."""
    lengths, numbers = (np.frombuffer(part, np.uint32) for part in found)
    return lengths, numbers


def _cores() -> int:
    """Cores that this process may use; not every system can tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

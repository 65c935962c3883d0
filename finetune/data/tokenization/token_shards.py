"""The progress of a token folder, on disk after each shard, so that a killed build resumes from there.

All files of a build only grow. After each `SHARD_BYTES` of text they are synchronised, and `state.json` is replaced by
how long they are and what has been counted. To resume, the files are cut to these lengths, and the source that was
being read is read again, without tokenising what is in them.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data.prepared_cache import STATE, STATE_VERSION
from finetune.data.progress_bar import Bar
from finetune.data.sources.conversation_formats import Tolerance
from finetune.data.sources.corpus import Corpus
from finetune.data.sources.documents import Chosen
from finetune.data.tokenization.split_writer import SplitWriter
from finetune.utils import json_files
from finetune.utils.atomic_files import digest_of, write_json
from finetune.utils.errors import DataError

SHARD_BYTES = 1 << 25
"""Text that a killed build tokenises again at most."""


class Shards:
    """Keeps the state of one build."""

    def __init__(
        self, folder: Path, corpora: Sequence[Corpus], sides: Mapping[str, SplitWriter], tolerance: Tolerance, bar: Bar
    ) -> None:
        """Goes back to the state that a killed build has left in the folder, if any."""
        self._path = folder / STATE
        self._corpora, self._sides, self._tolerance, self._bar = corpora, sides, tolerance, bar
        self.labels: dict[int | str, int] = {}
        """Labels in the order that they came, and their numbers."""
        self._source = 0
        self._documents = 0  # of the source, of which a state counts at least one
        self._all_documents = 0
        self._open = 0  # bytes of text since the last shard
        self._left: dict[str, Any] | None = None
        if self._path.exists():
            try:
                state = json_files.read(self._path, needed=("digest",))
                if state.pop("digest") != digest_of(state):
                    raise ValueError
                complete = [side.restore(state["sides"][name]) for name, side in sides.items()]
                self._source, self._documents = state["source"], state["documents"]
                self._all_documents = state["all_documents"]
                self.labels.update({label: number for number, label in enumerate(state["labels"])})
                self._left = state
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise DataError(f"{self._path} is damaged. Start again: it is made anew.") from error
            if not all(complete):
                raise DataError(
                    f"{folder} is damaged: it does not hold what was tokenised. Start again: it is made anew."
                )

    def begin(self, source: int, chosen: Iterator[Chosen]) -> Iterator[Chosen] | None:
        """The documents of a source that are to be tokenised; None if it is done."""
        if source < self._source:
            return None
        left, self._left = self._left, None
        if left is not None:
            read = deque(itertools.islice(chosen, self._documents), maxlen=1)
            # Reading again has counted again what was broken.
            self._tolerance.restore(left["broken"], left["first_broken"])
            if not read or read[0].digest != left["last"]:
                raise DataError(
                    f"{self._corpora[source].name} has changed since a build that was stopped has read it. Start again."
                )
            done = self._before() + read[0].read
            sizes = [corpus.size for corpus in self._corpora]
            share = ""
            if None not in sizes:
                share = f" ({done / sum(filter(None, sizes)):.0%} of the text was tokenised before)"
            self._bar.say(f"Resuming at document {self._all_documents + 1:,}{share}.")
            self._bar.start(done)
        else:
            for side in self._sides.values():
                side.begin()
        return chosen

    def advance(self, batch: Sequence[Chosen]) -> None:
        """Counts documents that were tokenised, and keeps the state if they end a shard."""
        self._documents += len(batch)
        self._all_documents += len(batch)
        self._open += sum(len(item.text) for item in batch)
        self._bar.advance(len(batch), self._before() + batch[-1].read)
        if self._open >= SHARD_BYTES:
            state = {
                "version": STATE_VERSION,
                "source": self._source,
                "documents": self._documents,
                "all_documents": self._all_documents,
                "last": batch[-1].digest,
                "labels": list(self.labels),
                "broken": dict(self._tolerance.counts),
                "first_broken": self._tolerance.first,
                "sides": {name: side.state() for name, side in self._sides.items()},
            }
            write_json(self._path, {**state, "digest": digest_of(state)})
            self._open = 0

    def end(self) -> None:
        """Ends a source."""
        self._source, self._documents = self._source + 1, 0

    def clear(self) -> None:
        """Removes all that only a build needs."""
        self._path.unlink(missing_ok=True)
        for side in self._sides.values():
            side.clear()

    def _before(self) -> int:
        """Bytes of the sources that are done."""
        return sum(corpus.size or 0 for corpus in self._corpora[: self._source])

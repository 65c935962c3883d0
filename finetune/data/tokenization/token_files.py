"""The token file: one stream of all documents' tokens, with offsets, for each side of the split."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from finetune.data.progress_bar import Bar
from finetune.data.sources.conversation_formats import Tolerance
from finetune.data.sources.corpus import Corpus
from finetune.data.sources.documents import Chosen, Rules, choose_texts
from finetune.data.text_issues import plain_text
from finetune.data.tokenization.encoding import Encoded, batch_documents
from finetune.data.tokenization.memmap import Int64s, MaskFile, damaged_file, map_array
from finetune.data.tokenization.split_writer import SplitWriter
from finetune.data.tokenization.token_shards import Shards
from finetune.utils.errors import DataError

FORMAT_VERSION = 4
TRAIN, HELD_OUT = "train", "held_out"

Tokens = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class TokenFile:
    """One side of a finished token folder, memory-mapped."""

    def __init__(self, folder: Path, side: str, dtype: str, *, labelled: bool, masked: bool = False) -> None:
        """Opens what `write_tokens` has written.

        Raises:
            DataError: If it is something else.
        """
        if dtype not in ("uint16", "uint32"):
            raise damaged_file(folder / f"{side}.tokens", f"its tokens are said to be {dtype}")
        self.tokens: Tokens = np.asarray(np.memmap(folder / f"{side}.tokens", dtype=np.dtype(dtype), mode="r"))
        self.offsets: Int64s = map_array(folder / f"{side}.offsets.npy")
        """(documents + 1,)"""
        self.labels: Int64s | None = None
        """(documents,): position in the folder's list of labels."""
        if labelled:
            self.labels = map_array(folder / f"{side}.labels.npy")
        self.mask = MaskFile(folder / f"{side}.mask") if masked else None
        """The tokens that are targets; None where all are."""
        self.digests: npt.NDArray[np.uint64] = map_array(folder / f"{side}.digests.npy", np.uint64)
        """(documents,): of their texts."""


def write_tokens(
    folder: Path,
    corpora: Sequence[Corpus],
    rules: Rules,
    encode_all: Callable[[Iterable[Sequence[Chosen]]], Iterator[tuple[Sequence[Chosen], Encoded]]],
    *,
    num_ids: int,
    bos: int | None,
    eos: int | None,
    restore: Callable[[str], str],
    tolerance: Tolerance,
    bar: Bar,
    held_digests: npt.NDArray[np.uint64] | None = None,
) -> dict[str, Any]:
    """Tokenises all documents of some sources into a folder, or those that a killed build has left to do.

    Args:
        folder: An empty folder, or one that a killed build of the same has left.
        corpora: The sources, in the order that their documents are to have.
        rules: How documents are normalised and split.
        encode_all: Turns batches of documents into tokens, each with its batch, in order.
        num_ids: Token numbers that there are.
        bos: Put before each document, if given.
        eos: Put behind each document, if given.
        restore: Turns a text into tokens and back, to see whether something is lost.
        tolerance: Of broken conversations; counts what reader and encoder meet.
        bar: Shows how far it is.
        held_digests: See `choose_texts`.

    Returns:
        JSON-able counts: `dtype`, `labels`, and for each side that has documents what the report shows.

    Raises:
        DataError: If a document cannot be read, or there is none.
    """
    dtype = np.dtype(np.uint16 if num_ids <= 1 << 16 else np.uint32)
    sides = {side: SplitWriter(folder, side, dtype, bos, eos, restore) for side in (TRAIN, HELD_OUT)}
    shards = Shards(folder, corpora, sides, tolerance, bar)
    labels = shards.labels
    for number, corpus in enumerate(corpora):
        chosen = shards.begin(number, choose_texts(corpus, rules, held_digests))
        if chosen is None:
            continue
        for batch, encoded in encode_all(batch_documents(chosen)):
            lengths, numbers, examples = encoded.lengths, encoded.numbers, encoded.examples
            codes = [labels.setdefault(item.label, len(labels)) for item in batch if item.label is not None]
            held = np.fromiter((item.held_out for item in batch), np.bool_, len(batch))
            for side, mask in ((sides[TRAIN], ~held), (sides[HELD_OUT], held)):
                if mask.any():
                    picked = np.flatnonzero(mask).tolist()
                    side.add(
                        [batch[i] for i in picked],
                        lengths[mask],
                        numbers[np.repeat(mask, lengths)],
                        [codes[i] for i in picked] if rules.labelled else None,
                        [examples[i] for i in picked] if examples is not None else None,
                    )
            shards.advance(batch)
        for side in sides.values():
            side.repeat(corpus.form)
        shards.end()
    counts = {name: side.finish() for name, side in sides.items()}
    if all(count is None for count in counts.values()):
        for side in sides.values():
            side.explain_nothing()
        names = ", ".join(corpus.name for corpus in corpora)
        raise DataError(
            f"There are no documents in {names}: nothing there but white space, if anything. Name a source that holds "
            "text."
        )
    shards.clear()
    return {"dtype": dtype.name, "labels": list(labels), **counts}


def training_texts(
    corpora: Sequence[Corpus], rules: Rules, held_digests: npt.NDArray[np.uint64] | None, bar: Bar
) -> Iterator[str]:
    """Yields the texts of the training side, each document once; of conversations what is said.

    Raises:
        DataError: If there is none.
    """
    count = before = 0
    for corpus in corpora:
        for item in choose_texts(corpus, rules, held_digests):
            if item.text and not item.held_out:
                count += 1
                bar.advance(1, before + item.read)
                yield plain_text(item.text) if corpus.form else item.text.decode("utf-8")
        before += corpus.size or 0
    if not count:
        raise DataError(
            "There are no training documents to train a tokenizer on: the sources of data.train hold nothing but "
            "white space, or everything is held out. Name a source that holds text, or lower data.validation_fraction."
        )

"""The tokenizer: loaded from a directory or the hub, or trained on the training documents."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase

from finetune.config import path_kinds
from finetune.config.recipe_schema import Recipe
from finetune.data.sources.corpus import reason_of
from finetune.data.sources.readers import END_OF_TEXT
from finetune.utils import json_files
from finetune.utils.errors import DataError
from finetune.utils.file_formats import format_of

PADDING = "<|pad|>"
TRAINER_VERSION = 1


class Wrapping(NamedTuple):
    """Tokens that a tokenizer puts around a single text for classifiers, such as [CLS] and [SEP]."""

    before: tuple[int, ...] = ()
    behind: tuple[int, ...] = ()


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
    wrong = path_kinds.not_a_tokenizer(Path(name))
    if wrong is not None:
        raise DataError(f"{'tokenizer' if section.name else 'model'}.name: {wrong}")
    try:
        return _open(name, revision, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # Each tokenizer class fails in its own way; all mean that there is none to use.
        _check_files(name)
        raise DataError(
            f"The tokenizer '{name}' cannot be loaded: {reason_of(error)}. It must be a directory with a tokenizer's "
            "files (such as tokenizer.json) or a name on the hub; correct tokenizer.name, or set tokenizer.vocab_size "
            "to train one."
        ) from error


def _check_files(name: str) -> None:
    """Refuses files that are something else than their names say, and a damaged configuration: it is read as well."""
    folder = Path(name)
    kinds = (".json", ".txt", ".model", ".jinja")
    for file in sorted(path for path in folder.glob("*") if path.suffix in kinds and os.access(path, os.R_OK)):
        if found := format_of(file) if file.is_file() else None:
            raise DataError(f"{file} is {found.name}, and no part of a tokenizer. {found.advice}")
    file = folder / "config.json"
    try:
        if file.is_file():
            json_files.read(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is no valid JSON: {error}. It is the model's configuration; restore it.") from error


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
    """One more than the largest token number; gaps in the vocabulary count."""
    return max(max(tokenizer.get_vocab().values(), default=0) + 1, len(tokenizer))


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


def wrapping_of(tokenizer: PreTrainedTokenizerBase) -> Wrapping:
    """Finds what the tokenizer itself puts before and behind a text.

    Raises:
        DataError: If it does something else to the text as well.
    """
    probe = "a"
    bare = list(tokenizer.encode(probe, add_special_tokens=False))
    full = list(tokenizer.encode(probe, add_special_tokens=True))
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return Wrapping(tuple(full[:start]), tuple(full[start + len(bare) :]))
    raise DataError(
        f"The tokenizer {type(tokenizer).__name__} changes a text when it adds special tokens, so its documents cannot "
        "be prepared for a classifier. Name another as tokenizer.name."
    )


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that fills rows. Nothing is learned from it, so any will do where there is none for it."""
    return next((int(n) for n in (tokenizer.pad_token_id, tokenizer.eos_token_id) if n is not None), 0)


def _open(name: str, revision: str | None, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    folder = Path(name)
    if folder.is_dir():
        files = {path.name for path in folder.iterdir()}
        # The form that GPT-2 was published in says nowhere which class it belongs to.
        named = files & {"tokenizer.json", "tokenizer_config.json", "config.json"}
        if {"vocab.json", "merges.txt"} <= files and not named:
            return transformers.GPT2TokenizerFast.from_pretrained(str(folder))
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    return transformers.AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)

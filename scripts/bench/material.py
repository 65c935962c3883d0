"""What all arms of a case share, made once: weights, tokenizer and rows of tokens.

Shapes: N rows in the order in which they are read, T tokens a row.
"""

import json
from itertools import islice
from pathlib import Path

import numpy as np

from bench.cases import SHAPES, Case

LARGEST_TOKENIZER = 32000


def texts(file: Path | None, count: int) -> list[str]:
    """Stories of a file of `{"text": …}` lines, or of the built-in generator without one."""
    if file is None:
        from finetune.data.synthetic.story_generator import stories

        return [story.text for story in islice(stories(count), count)]
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line)["text"].strip() for line in islice(lines, count)]


def tokenizer_folder(folder: Path, vocab: int, file: Path | None) -> Path:
    """A tokenizer of that many pieces or of `LARGEST_TOKENIZER`, trained on the stories; made if it is not there."""
    from finetune.data.tokenization.tokenizer import train_tokenizer

    size = min(vocab, LARGEST_TOKENIZER)
    path = folder / f"tokenizer-{size}"
    if not path.exists():
        train_tokenizer(iter(texts(file, 7000)), size).save_pretrained(path)
    return path


def model_folder(folder: Path, case: Case, file: Path | None) -> Path:
    """The first weights, as a directory that transformers opens; bf16 where they stay frozen."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    frozen = case.kind != "full" and case.precision == "bf16"
    path = folder / f"model-{case.shape}-{'bf16' if frozen else 'fp32'}"
    if path.exists():
        return path
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(folder, SHAPES[case.shape].vocab, file))
    specials = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(**SHAPES[case.shape].config, **specials)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if frozen else torch.float32
    network = AutoModelForCausalLM.from_config(config, dtype=dtype)
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def tokens_folder(folder: Path, model: Path, stories: Path, length: int) -> Path:
    """Stories as tokens, as a data set on disk, for a script that finds its data ready."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    path = folder / f"tokens-{stories.stem}-{model.name}"
    if not path.exists():
        told = [json.loads(line)["text"] for line in stories.read_text(encoding="utf-8").splitlines()]
        found = AutoTokenizer.from_pretrained(model)(told, truncation=True, max_length=length)
        Dataset.from_dict(dict(found)).save_to_disk(path)
    return path


def rows_file(folder: Path, case: Case, steps: int, file: Path | None) -> Path:
    """An array (N, T) of the rows that `steps` steps read, in that order.

    Raises:
        ValueError: If there is too little text.
    """
    from transformers import AutoTokenizer

    needed = steps * case.rows
    path = folder / f"rows-{case.shape}-{case.length}-{needed}.npy"
    if path.exists():
        return path
    where = tokenizer_folder(folder, SHAPES[case.shape].vocab, file)
    tokenizer = AutoTokenizer.from_pretrained(where)
    flat: list[int] = []
    for text in texts(file, 1_000_000 if file else 40_000):
        flat += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(flat) >= needed * case.length:
            break
    if len(flat) < needed * case.length:
        raise ValueError(f"{case.name} reads {needed} rows of {case.length} tokens, but the text has {len(flat)} only")
    np.save(path, np.array(flat[: needed * case.length], np.int64).reshape(needed, case.length))
    return path

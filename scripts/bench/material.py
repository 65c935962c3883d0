"""What all arms of a case share, made once: weights, tokenizer and rows of tokens.

Shapes: N rows in the order in which they are read, T tokens a row.
"""

import json
from itertools import islice, pairwise
from pathlib import Path

import numpy as np

from bench.cases import DPO, SHAPES, Case

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

    frozen = case.kind in ("lora", "qlora") and case.precision == "bf16"
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


def pairs_file(folder: Path, case: Case, steps: int, file: Path | None) -> Path:
    """The pairs that `steps` steps read, as JSON lines: a story goes on as it does, or as another one does."""
    path, needed = folder / f"pairs-{steps * case.rows}.jsonl", steps * case.rows
    stories = [words for text in texts(file, 3 * needed + 64) if len(words := text.split()) > 60][: needed + 1]
    with path.open("w", encoding="utf-8") as out:
        for story, other in pairwise(stories):
            halves = {"chosen": story[20 : 60 + len(other) % 60], "rejected": other[20 : 60 + len(story) % 60]}
            answers = {half: f" {' '.join(words)}" for half, words in halves.items()}
            out.write(json.dumps({"prompt": " ".join(story[:20]), **answers}) + "\n")
    return path


def rows_file(folder: Path, case: Case, steps: int, file: Path | None) -> Path:
    """An array (N, T) of the rows that `steps` steps read, in that order.

    Raises:
        ValueError: If there is too little text.
    """
    from transformers import AutoTokenizer

    if case.kind == DPO:
        return pairs_file(folder, case, steps, file)
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

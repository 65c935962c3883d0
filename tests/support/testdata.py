"""What the tests train on: built-in stories and conversations, and a tiny Llama that has learned such stories.

All of it is made on the spot, once for a version of this file (`ensure`; conftest.py calls it), without the toolkit's
own loop, tokenizer training or export: transformers, tokenizers and json alone have written what is read here.

`REAL` is the one outside path: texts and a network that others have published, which no user of the project has. The
few tests that compare with published figures are marked `real_data`, and skipped without it.
"""

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(os.environ.get("FINETUNE_REAL_DATA") or ROOT.parent / "shared" / "data")

_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
MADE = ROOT / "build" / f"testdata-{_DIGEST}"
MODEL = str(MADE / "llama")
"""123,712 parameters, 512 pieces, 512 positions: a Llama with its tokenizer, as transformers saves them."""
BPE = str(MADE / "bpe")
"""A tokenizer of another kind and size: GPT-2's files, with a mark for the end of a text and none for its begin."""
CONVERSATIONS = MADE / "conversations"
"""`sharegpt.json`, `questions.jsonl` (question and answer), `tasks.jsonl` (nested instances)."""

STEPS, ROWS, TOKENS = 300, 8, 128


def stories(split: str, **more: Any) -> list[dict[str, Any]]:
    """A recipe's sources: `train` (2,000 stories) or `validation` (200 others)."""
    return [{"path": str(MADE / "stories" / f"{split}.jsonl"), **more}]


def ensure() -> Path:
    """Makes the folder unless it is there; whoever comes meanwhile waits."""
    MADE.parent.mkdir(exist_ok=True)
    with FileLock(f"{MADE}.lock"):
        if not MADE.is_dir():
            with tempfile.TemporaryDirectory(dir=MADE.parent) as place:
                _make(Path(place) / "made")
                shutil.move(Path(place) / "made", MADE)
    return MADE


def _make(place: Path) -> None:
    from finetune.data.synthetic import story_generator

    texts = [_beginning(story.text, number) for number, story in enumerate(story_generator.stories(2200))]
    (place / "stories").mkdir(parents=True)
    for name, part in (("train", texts[:2000]), ("validation", texts[2000:])):
        (place / "stories" / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (place / "stories" / "endoftext.txt").write_text("\n<|endoftext|>\n".join(texts[:5]) + "\n<|endoftext|>\n")
    _make_conversations(place / "conversations")
    _make_bpe(place / "bpe", texts[:500])
    _make_llama(place / "llama", texts)


def _beginning(text: str, number: int) -> str:
    """Some of a story's sentences, from one to all: rows of equal length must hold unequal numbers of documents."""
    sentences = re.split(r"(?<=[.!?]) ", text)
    return " ".join(sentences[: 1 + 5 * number % len(sentences)])


def _make_conversations(place: Path) -> None:
    from finetune.data.synthetic.story_generator import conversations

    place.mkdir()
    chats = [chat.messages for chat in conversations(700)]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [
        {
            "id": f"chat_{number}",
            "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in messages],
        }
        for number, messages in enumerate(chats[:400])
    ]
    (place / "sharegpt.json").write_text(json.dumps(shared, indent=1))
    pairs = [(messages[-2]["content"], messages[-1]["content"]) for messages in chats[400:]]
    with open(place / "questions.jsonl", "w") as file:
        file.writelines(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs)
    with open(place / "tasks.jsonl", "w") as file:
        for number, (instruction, output) in enumerate(pairs[:150]):
            task = {"id": f"task_{number}", "instruction": instruction, "instances": [{"input": "", "output": output}]}
            file.write(json.dumps(task) + "\n")


def _make_bpe(place: Path, texts: list[str]) -> None:
    from tokenizers import ByteLevelBPETokenizer

    place.mkdir()
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=900, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save_model(str(place))


def _make_llama(place: Path, texts: list[str]) -> None:
    """Trains on the texts in plain PyTorch, about 20 s on one core, until continuations look like stories."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    tokenizer.save_pretrained(place)

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    network = LlamaForCausalLM(config)
    stream = torch.tensor(list(itertools.chain.from_iterable([*ids, 2] for ids in tokenizer(texts)["input_ids"])))
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    for _ in range(STEPS):
        starts = torch.randint(len(stream) - TOKENS, (ROWS,)).tolist()
        ids = torch.stack([stream[start : start + TOKENS] for start in starts])
        network(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    network.save_pretrained(place)


if __name__ == "__main__":
    print(ensure())

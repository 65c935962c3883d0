"""Chat templates in the style of real models, a tokenizer that has all their special tokens, and wild conversations."""

import functools
import inspect
import re
from typing import Any

import pytest
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from finetune.config.recipe_schema import ChatSection
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.chat.chat_templates import SHIPPED, find_template
from finetune.data.sources.conversation_formats import Conversation, Tolerance
from finetune.data.tokenization.encoded import Example

# Transformers that reads special tokens in a message as what they are says nothing about texts that we keep apart.
KEEPS_THEM_APART = pytest.mark.skipif(
    "sanitize_control_tokens" not in inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
    reason="this transformers reads special tokens in messages",
)

SPECIALS = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"),
)
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
CHATML = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# As Qwen3 does: thoughts of turns before the last one of the user's are not kept.
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- if message.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- generation %}{{ content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
MISTRAL = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
{%- elif message.role == 'system' %}{{ message.content + '\\n\\n' }}
{%- else %}{{ '[INST] ' + message.content + ' [/INST]' }}{% endif %}
{%- endfor %}"""
PLAIN = SHIPPED["plain"].read_text()
# What each writes for an answer.
STYLES: dict[str, tuple[str, Any]] = {
    "llama3": (LLAMA3, lambda text: text.strip() + "<|eot_id|>"),
    "chatml": (CHATML, lambda text: text + "<|im_end|>"),
    "mistral": (MISTRAL, lambda text: " " + text + "</s>"),
    "plain": (PLAIN, lambda text: " " + text + "</s>"),
}


def unmarked(template: str) -> str:
    """A template that writes the same, without marks."""
    return re.sub(r"\{%-? (end)?generation -?%\}|\{%-?\s*(end)?generation\s*-?%\}", _hollow, template)


def _hollow(match: re.Match[str]) -> str:
    # A statement that does nothing keeps the white space control of the one that it replaces.
    return match[0].replace("endgeneration", "set _ = 0").replace("generation", "set _ = 0")


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A small byte-level BPE."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    said = "Hello there, what is the answer? The answer is forty two. user assistant\n\n\nuser"
    made.train_from_iterator([said] * 9, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<|begin_of_text|>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=list(SPECIALS),
    )


def encoder(
    template: str | None = None, *, row_length: int = 10_000, lenient: bool = False, **keys: Any
) -> ChatEncoder:
    """An encoder for a template's text; None for the plain one."""
    section = ChatSection(**keys)
    reader = tokenizer()
    reader.chat_template = template
    found = find_template(reader, "plain" if template is None else None, {})
    tolerance = Tolerance(lenient)
    return ChatEncoder(reader, found, section, row_length=row_length, around=(None, None), tolerance=tolerance)


def talk(*turns: str, system: str | None = None, weights: list[int] | None = None) -> Conversation:
    """A conversation of a user's and an assistant's turns."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages += [{"role": ("user", "assistant")[n % 2], "content": turn} for n, turn in enumerate(turns)]
    completion = max((n + 1 for n, m in enumerate(messages) if m["role"] == "user"), default=0)
    return Conversation(messages, weights or [1] * len(messages), None, completion)


def example(conversation: Conversation, template: str | None = None, **keys: Any) -> Example:
    return encoder(template, **keys).encode(conversation.to_json().encode(), "here")


def learned(made: Example, reader: PreTrainedTokenizerBase | None = None) -> list[str]:
    """The runs of learned tokens, as text."""
    runs: list[list[int]] = []
    before = False
    for token, target in zip(made.ids.tolist(), made.mask.tolist(), strict=True):
        if target and not before:
            runs.append([])
        if target:
            runs[-1].append(token)
        before = target
    return [(reader or tokenizer()).decode(run) for run in runs]


_words = st.sampled_from([*SPECIALS, "<|im_", "end|>", "\n", " ", "assistant", "user", "\ufdd0", "\ufdd1", "é世🌍"])
TEXTS = st.lists(_words | st.text(st.characters(exclude_categories=("Cs",)), max_size=8), max_size=5).map("".join)
# Runs of answers must not touch, so between two of them there is a question.
TALKS = st.builds(
    lambda pairs, system: talk(*[text for pair in pairs for text in pair], system=system),
    st.lists(st.tuples(TEXTS, TEXTS.filter(str.strip)), min_size=1, max_size=4),
    st.none() | TEXTS,
)

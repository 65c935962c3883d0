"""Chat templates that ship: what each writes is the format that its models' makers have published."""

import json
import re
from typing import Any

import pytest
from chats import tokenizer

from finetune.config.recipe_schema import ChatSection
from finetune.data.chat.chat_templates import SHIPPED, Template, find_answers, find_template, write_conversation
from finetune.data.sources.conversation_formats import Conversation
from finetune.utils.errors import DataError

SYSTEM, WHO, NORA = (
    {"role": role, "content": text} for role, text in (("system", "Be kind."), ("user", "Who?"), ("assistant", "Nora."))
)
AND, CAT = {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Her cat."}
# What is written of SYSTEM, WHO, NORA, AND, CAT, with [ ] around what is learned, and behind ¦ what asks for an answer.
CHATML = (
    "<im>user\nWho?<e>\n<im>assistant\n[Nora.<e>]\n<im>user\nAnd?<e>\n<im>assistant\n[Her cat.<e>]\n¦<im>assistant\n"
)
HEADERS = "".join(
    f"<h>{role}</h>\n\n{text}"
    for role, text in (
        ("system", "Be kind.<e>"),
        ("user", "Who?<e>"),
        ("assistant", "[Nora.<e>]"),
        ("user", "And?<e>"),
        ("assistant", "[Her cat.<e>]"),
    )
)
FORMATS = {
    "chatml": "<im>system\nBe kind.<e>\n" + CHATML,
    "qwen": "<im>system\nBe kind.<e>\n" + CHATML,
    "qwen3": "<im>system\nBe kind.<e>\n" + CHATML.replace("[Her", "[<think>\n\n</think>\n\nHer"),
    "llama2": "<s>{INST} <<SYS>>\nBe kind.\n<</SYS>>\n\nWho? {/INST}"
    "[ Nora. </s>]<s>{INST} And? {/INST}[ Her cat. </s>]¦",
    "llama3": f"<s>{HEADERS}¦<h>assistant</h>\n\n",
    "llama4": f"<s>{HEADERS}¦<h>assistant</h>\n\n",
    "gemma": "<s><t>user\nBe kind.\n\nWho?<e>\n<t>model\n[Nora.<e>]\n"
    "<t>user\nAnd?<e>\n<t>model\n[Her cat.<e>]\n¦<t>model\n",
    "mistral": "<s>{INST} Who?{/INST}[ Nora.</s>]{INST} Be kind.\n\nAnd?{/INST}[ Her cat.</s>]¦",
    "phi": "<|system|>\nBe kind.<e>\n<|user|>\nWho?<e>\n<|assistant|>\n[Nora.<e>]\n<|user|>\nAnd?<e>\n<|assistant|>\n"
    "[Her cat.<e>]\n</s>¦<|assistant|>\n",
    "phi4": "<im>system<|im_sep|>Be kind.<e><im>user<|im_sep|>Who?<e><im>assistant<|im_sep|>[Nora.<e>]"
    "<im>user<|im_sep|>And?<e><im>assistant<|im_sep|>[Her cat.<e>]¦<im>assistant<|im_sep|>",
    "deepseek": "<s>Be kind.<｜User｜>Who?<｜Assistant｜>[Nora.<e>]"
    "<｜User｜>And?<｜Assistant｜>[Her cat.<e>]¦<｜Assistant｜>",
    "alpaca": "<s>Be kind.\n\n### Instruction:\nWho?\n\n### Response:\n[Nora.</s>]\n\n### Instruction:\nAnd?\n\n"
    "### Response:\n[Her cat.</s>]¦\n\n### Response:\n",
    "gpt-oss": "<st>system<m>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
    "Current date: 2024-07-26\n\nReasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be "
    "included for every message.<e><st>developer<m># Instructions\n\nBe kind.\n\n<e><st>user<m>Who?<e><st>assistant"
    "[<|channel|>final<m>Nora.<e>]<st>user<m>And?<e><st>assistant[<|channel|>final<m>Her cat.<|return|>]¦<st>assistant",
    "plain": "System: Be kind.\n\nUser: Who?\n\nAssistant:[ Nora.</s>]\n\nUser: And?\n\n"
    "Assistant:[ Her cat.</s>]\n\n¦Assistant:",
}  # fmt: skip
ENDS = {"llama3": "<|eot_id|>", "llama4": "<|eot|>", "gemma": "<end_of_turn>", "phi": "<|end|>", "gpt-oss": "<|end|>"}
ENDS |= {"deepseek": "<｜end▁of▁sentence｜>"}
CALLS = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"a": 1}}}]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
FOUND = {"role": "tool", "content": "9"}
THOUGHT = {**CAT, "reasoning_content": "She had one."}


def spelled(name: str, text: str) -> str:
    """A format with its special tokens written out."""
    header = (
        ("<|start_header_id|>", "<|end_header_id|>") if name == "llama3" else ("<|header_start|>", "<|header_end|>")
    )
    words = {"<im>": "<|im_start|>", "<e>": ENDS.get(name, "<|im_end|>"), "<h>": header[0], "</h>": header[1]}
    words |= {"<t>": "<start_of_turn>", "<st>": "<|start|>", "<m>": "<|message|>"}
    for word, token in words.items():
        text = text.replace(word, token)
    return text


def named(name: str, **variables: Any) -> Template:
    return find_template(tokenizer(), name, {"bos_token": "<s>", "eos_token": "</s>", **variables})


def talk(*messages: dict[str, Any], tools: list[Any] | None = None) -> Conversation:
    return Conversation(list(messages), [1] * len(messages), tools, 0)


def marked(template: Template, chat: Conversation) -> str:
    """A conversation as text, with [ ] around what is learned."""
    text, spans = template.render_marked(chat, "here")
    for start, end in reversed(spans):
        text = f"{text[:start]}[{text[start:end]}]{text[end:]}"
    return text


@pytest.mark.parametrize("name", SHIPPED)
def test_the_published_format_and_its_answers(name: str) -> None:
    whole, _, prompt = spelled(name, FORMATS[name]).partition("¦")
    whole, prompt = (text.replace("{", "[").replace("}", "]") for text in (whole, prompt))
    template = named(name)
    assert marked(template, talk(SYSTEM, WHO, NORA, AND, CAT)) == whole
    asked = template.render(talk(WHO), "here", prompt=True)
    assert asked.endswith(prompt)
    assert "Who?" in asked[: len(asked) - len(prompt)]


@pytest.mark.parametrize("name", SHIPPED)
def test_answers_are_found_and_all_is_written(name: str) -> None:
    """Also in a record of one exchange, without a system message; nothing is written twice."""
    template, chat = named(name), talk(WHO, NORA)
    assert not write_conversation(template, chat, "here").missing
    text, spans = find_answers(template, chat, [1], re.compile(r"<[^>]*>"), "here")
    ((start, end),) = spans[1]
    assert text[start:end].strip().removeprefix("<think>\n\n</think>\n\n").startswith(("Nora.", "<|channel|>final"))
    assert text.count("Nora.") == text.count("Who?") == 1
    assert text[start:end] != "Nora.", "what ends an answer is learned"


@pytest.mark.parametrize("name", ["qwen", "qwen3"])
def test_tools_and_calls(name: str) -> None:
    template = named(name)
    chat = talk(WHO, CALLS, FOUND, FOUND, NORA, tools=TOOLS)
    assert not write_conversation(template, chat, "here").missing
    text = marked(template, chat)
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    call = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n[{call}<|im_end|>]\n<|im_start|>user\n<tool_response>\n9\n</tool_response>" in text
    assert "9\n</tool_response>\n<tool_response>\n9\n</tool_response><|im_end|>\n" in text
    assert text.count("<|im_start|>user") == 2, "results that follow each other are of one turn"
    both = marked(template, talk(WHO, {**CALLS, "content": "Let me see."}, FOUND, NORA, tools=TOOLS))
    assert f"[Let me see.\n{call}<|im_end|>]" in both


def test_tools_that_are_not_written_are_told() -> None:
    fields = {
        part.field
        for part in write_conversation(named("chatml"), talk(WHO, CALLS, FOUND, NORA, tools=TOOLS), "here").missing
    }
    assert fields == {"tools", "tool_calls"}


def test_thoughts() -> None:
    last = talk(WHO, {**NORA, "reasoning_content": "Hm."}, AND, THOUGHT)
    assert "[<think>\nShe had one.\n</think>\n\nHer cat.<|im_end|>]" in marked(named("qwen3"), last)
    assert "Hm." not in marked(named("qwen3"), last), "thoughts of earlier turns are not written"
    said = marked(named("gpt-oss", reasoning_effort="high"), last)
    analysis = "<|channel|>analysis<|message|>She had one.<|end|><|start|>assistant"
    assert f"[{analysis}<|channel|>final<|message|>Her cat.<|return|>]" in said
    assert "Reasoning: high\n" in said
    asked = named("qwen3", enable_thinking=False).render(talk(WHO), "here", prompt=True)
    assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_qwen_has_a_system_message_of_its_own() -> None:
    said = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    assert named("qwen").render(talk(WHO, NORA), "here").startswith(said)


def test_names_are_told() -> None:
    assert set(FORMATS) == set(SHIPPED)
    with pytest.raises(DataError, match=r"cannot be read.*one of alpaca, chatml, deepseek, .*qwen3"):
        find_template(tokenizer(), "lama3", {})
    meaning = ChatSection.model_fields["template"].description or ""
    assert re.findall(r"`([a-z0-9-]+)`", meaning) == list(SHIPPED)

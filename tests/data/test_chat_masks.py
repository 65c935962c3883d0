"""What is learned of a conversation: exactly its answers and the tokens that end them, however it is found."""

import json
from typing import Any

import pytest
from chats import (
    CHATML,
    KEEPS_THEM_APART,
    LLAMA3,
    MISTRAL,
    PLAIN,
    SPECIALS,
    STYLES,
    TALKS,
    THINKING,
    encoder,
    example,
    learned,
    talk,
    tokenizer,
)
from chats import unmarked as without_marks
from hypothesis import given, settings
from testdata import CONVERSATIONS
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.config.recipe_schema import ChatSection
from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.chat.chat_templates import Template, find_template
from finetune.data.sources.conversation_formats import Conversation, InvalidConversation, Tolerance
from finetune.utils.errors import DataError

EXCHANGES = talk("Hello", "The answer", "what is", "forty two", system="there")


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=30)
@given(conversation=TALKS)
def test_answers_and_their_ends_are_learned(style: str, marked: bool, conversation: Conversation) -> None:
    template, spoken = STYLES[style]
    made = example(conversation, template if marked else without_marks(template))
    expected = [spoken(m["content"]) for m in conversation.messages if m["role"] == "assistant"]
    found = learned(made)
    if made.facts.shared:
        # An answer's first token may hold the line break before it.
        assert [text.strip() for text in found] == [text.strip() for text in expected]
    else:
        assert found == expected
    assert made.facts.supervised == made.mask[1:].sum() > 0
    assert made.facts.ended == 1


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=30)
@given(conversation=TALKS)
def test_marks_and_differences_agree(style: str, conversation: Conversation) -> None:
    template, _ = STYLES[style]
    one, other = example(conversation, template), example(conversation, without_marks(template))
    assert one.ids.tolist() == other.ids.tolist()
    assert one.mask.tolist() == other.mask.tolist()
    assert one.facts == other.facts


@KEEPS_THEM_APART
@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=30)
@given(conversation=TALKS)
def test_tokens_are_those_of_transformers(style: str, conversation: Conversation) -> None:
    """Which can keep special tokens in messages apart as well, but then gives no mask."""
    template, _ = STYLES[style]
    # It drops characters that no text may hold.
    messages = [
        {"role": m["role"], "content": m["content"].replace("\ufdd0", "").replace("\ufdd1", "")}
        for m in conversation.messages
    ]
    clean = Conversation(messages, conversation.weights, None, conversation.completion)
    if not all(message["content"].strip() for message in messages if message["role"] == "assistant"):
        return
    theirs = tokenizer().apply_chat_template(
        messages, chat_template=template, sanitize_control_tokens=True, tokenize=True, return_dict=False
    )
    assert example(clean, template).ids.tolist() == theirs


@pytest.mark.parametrize("text", SPECIALS)
def test_special_tokens_in_messages_are_characters(text: str) -> None:
    for template in (LLAMA3, CHATML, MISTRAL, without_marks(CHATML)):
        plain = example(talk("Hello", "the answer"), template)
        said = example(talk(f"Hello {text}", f"the {text} answer"), template)
        number = tokenizer().convert_tokens_to_ids(text)
        assert (said.ids == number).sum() == (plain.ids == number).sum()
        assert text in tokenizer().decode(said.ids.tolist())
        assert f"the {text} answer" in learned(said)[0]


def test_a_vocabulary_that_holds_a_special_token_as_a_word_is_refused() -> None:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")
    chat = ChatEncoder(
        words, Template(PLAIN, "plain"), ChatSection(), row_length=99, around=(None, None), tolerance=Tolerance(False)
    )
    with pytest.raises(InvalidConversation, match="'</s>' becomes a special token whatever is done"):
        chat.encode(talk("a </s> a", "a").to_json().encode(), "here")


# ---------------------------------------------------------------- what is learned


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)])
@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("assistant", ["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]),
        ("last", ["a3<|im_end|>"]),
        ("completions", ["a2<|im_end|>", "a3<|im_end|>"]),
    ],
)
def test_train_on(template: str, train_on: str, expected: list[str]) -> None:
    roles = ["user", "assistant", "user", "assistant", "tool", "assistant"]
    texts = ["u1", "a1", "u2", "a2", "t", "a3"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    made = example(Conversation(messages, [1] * 6, None, 3), template, train_on=train_on)
    assert learned(made) == expected
    assert made.facts.answers == len(expected)


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)])
def test_train_on_all(template: str) -> None:
    made = example(EXCHANGES, template, train_on="all")
    assert made.mask.all()
    assert made.facts.supervised == made.ids.size - 1, "nothing comes before the first token"
    assert made.facts.ended == 1
    silent = example(talk("Hello", "no", "what", "yes", weights=[1, 0, 1, 1]), template, train_on="all")
    assert "no" not in "".join(learned(silent))
    assert "yes<|im_end|>" in learned(silent)[-1]


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)])
def test_weight_nought_is_not_learned(template: str) -> None:
    made = example(talk("Hello", "no", "what", "yes", weights=[1, 0, 1, 1]), template)
    assert learned(made) == ["yes<|im_end|>"]
    nothing = example(talk("Hello", "no", weights=[1, 0]), template)
    assert nothing.ids.size == 0
    assert nothing.facts.unsupervised == 1


def test_an_answer_marked_in_pieces() -> None:
    """Which pieces belong to which answer is counted turn by turn."""
    pieces = CHATML.replace("message.content + '<|im_end|>'", "message.content").replace(
        "{% endgeneration %}{{ '\\n' }}", "{% endgeneration %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}\n"
    )
    made = example(talk("Hello", "no", "what", "yes", weights=[1, 0, 1, 1]), pieces)
    assert learned(made) == ["yes<|im_end|>"]


# ---------------------------------------------------------------- how answers end

ENDLESS = CHATML.replace("message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}", "message.content }}X")
ENDLESS = ENDLESS.replace("X", "{% endgeneration %}{{ '\\n' }}")
BESIDE = ENDLESS.replace("{% endgeneration %}{{ '\\n' }}", "{% endgeneration %}{{ '<|im_end|>\\n' }}")


@pytest.mark.parametrize(
    ("template", "end_token", "end", "ended"),
    [
        (CHATML, "template", "<|im_end|>", 1),
        (CHATML, "add", "<|im_end|>", 1),
        (BESIDE, "template", "", 0),
        (BESIDE, "add", "<|im_end|>", 1),
        (ENDLESS, "template", "", 0),
        (ENDLESS, "add", "</s>", 1),
        (without_marks(ENDLESS), "template", "", 0),
        (without_marks(ENDLESS), "add", "</s>", 1),
    ],
)
def test_end_tokens(template: str, end_token: str, end: str, ended: int) -> None:
    assert template.count("generation") >= 1
    made = example(EXCHANGES, template, end_token=end_token)
    assert learned(made) == ["The answer" + end, "forty two" + end]
    assert made.facts.ended == ended
    assert made.facts.ends == ({str(tokenizer().convert_tokens_to_ids(end)): 1} if ended else {})
    if end == "</s>":  # put there, and nothing else moved
        kept = made.ids[made.ids != tokenizer().eos_token_id]
        assert kept.tolist() == example(EXCHANGES, template).ids.tolist()


def test_an_end_cannot_be_added_without_one() -> None:
    made = encoder(ENDLESS, end_token="add")
    made._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer().backend_tokenizer)
    with pytest.raises(DataError, match=r"no end-of-text token. Set chat\.end_token to `template`"):
        made.encode(EXCHANGES.to_json().encode(), "here")


# ---------------------------------------------------------------- templates that rewrite history

THOUGHTS = talk("Hello", "<think>why</think>the answer", "what", "<think>so</think>forty two")


def test_a_template_that_rewrites_history_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        example(THOUGHTS, without_marks(THINKING))
    said = str(caught.value)
    assert "here, turn 2" in said
    assert "no {% generation %} marks, and it rewrites an answer when others follow" in said
    assert "<think>why</thi" in said
    assert "chat.train_on: last" in said
    assert learned(example(THOUGHTS, without_marks(THINKING), train_on="last")) == [
        "<think>so</think>forty two<|im_end|>"
    ]
    # Its own marks say what it wrote.
    assert learned(example(THOUGHTS, THINKING)) == ["the answer<|im_end|>", "<think>so</think>forty two<|im_end|>"]


def test_a_prompt_that_is_not_how_answers_begin_is_refused() -> None:
    other = without_marks(CHATML).replace("add_generation_prompt %}{{ '<|im_start|>", "add_generation_prompt %}{{ '<s>")
    with pytest.raises(DataError, match=r"its prompt for an answer is not how it then writes one: `.*<s>assistant"):
        example(EXCHANGES, other)


# ---------------------------------------------------------------- too long


@settings(max_examples=30)
@given(conversation=TALKS)
@pytest.mark.parametrize("too_long", ["drop", "cut_left", "cut_right"])
def test_too_long(too_long: str, conversation: Conversation) -> None:
    """What is left fits, is a part of the whole, and no answer is lost without being counted."""
    whole = example(conversation, CHATML)
    room = max(2, whole.ids.size * 2 // 3)
    made = example(conversation, CHATML, too_long=too_long, row_length=room - 1)
    assert made.ids.size <= room
    if made.facts.examples:
        assert made.facts.supervised == made.mask[1:].sum() > 0
    if whole.ids.size <= room:
        assert made.ids.tolist() == whole.ids.tolist()
    elif too_long == "drop" or not made.facts.examples:
        assert made.ids.size == 0
        assert made.facts.too_long == 1
    elif too_long == "cut_right":
        assert made.ids.tolist() == whole.ids[:room].tolist()
        # By number: an answer may say the end token in characters.
        closing = tokenizer().convert_tokens_to_ids("<|im_end|>")
        closed = made.ids[made.mask] == closing
        assert made.facts.answers_cut == whole.facts.answers - int(closed.sum())
        assert made.facts.ended == int(closed[-1])
        assert made.facts.cut == 1
    else:
        # Whole exchanges go, from the left, and no answer loses anything.
        assert learned(made) == learned(whole)[-len(learned(made)) :]
        assert made.facts.answers_cut == 0
        if conversation.messages[0]["role"] == "system":
            assert (
                tokenizer()
                .decode(made.ids.tolist())
                .startswith(f"<|im_start|>system\n{conversation.messages[0]['content']}")
            )


def test_the_first_token_is_never_a_target() -> None:
    made = example(
        Conversation([{"role": "assistant", "content": "a"}], [1], None, 0), "{{ messages[0].content }}", train_on="all"
    )
    assert made.facts.unsupervised == 1


def test_dates_stand_still() -> None:
    """Rows must not differ from day to day."""
    dated = "{% set today = strftime_now('%d %B %Y') %}{{ today + ' ' + strftime_now(\"%Y\") }}\n" + CHATML
    made = example(EXCHANGES, dated)
    assert tokenizer().decode(made.ids.tolist()).startswith("26 July 2024 2024")


@pytest.mark.parametrize("template", [CHATML, without_marks(CHATML)])
def test_answers_that_begin_inside_a_token_are_counted(template: str) -> None:
    """Line breaks of the prompt and of the answer become one token, which is learned."""
    made = example(talk("Hello", "\n\n\nanswer"), template)
    assert made.facts.shared == 1
    assert learned(made) == ["\n\n\n\nanswer<|im_end|>"]
    assert example(talk("Hello", "answer"), template).facts.shared == 0


TOOLS = CHATML.replace(
    "message.content + '<|im_end|>'",
    "(message.content or '') + ('<s>' + message.tool_calls | tojson + '</s>' if message.tool_calls else '')"
    " + '<|im_end|>'",
)


@pytest.mark.parametrize("marked", [True, False])
def test_calls_of_tools_are_learned(marked: bool) -> None:
    """With special tokens of their own, and tools that the template is told of."""
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2"},
        {"role": "assistant", "tool_calls": call},
        {"role": "tool", "content": "<s>5"},
        {"role": "assistant", "content": "Five."},
    ]
    template = "{{ tools[0].name }}\n" + (TOOLS if marked else without_marks(TOOLS))
    made = example(Conversation(messages, [1] * 4, [{"name": "add"}], 1), template)
    assert learned(made) == [f"<s>{json.dumps(call)}</s><|im_end|>", "Five.<|im_end|>"]
    assert tokenizer().decode(made.ids.tolist()).startswith("add<|im_start|>")


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def calling(tools: list[Any]) -> Conversation:
    call = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2"}, {"role": "assistant", "tool_calls": call}]
    return Conversation(messages, [1, 1], tools, 1)


@pytest.mark.parametrize("tools", [[ADD], [{"name": "add"}, ADD], [{"name": "a", "description": "<s> 'a' & <b>"}]])
def test_the_plain_template_writes_tools(tools: list[Any]) -> None:
    made = example(calling(tools))
    text = tokenizer().decode(made.ids.tolist())
    assert text.startswith(f"Tools: {json.dumps(tools)}\n\nUser: 2\n\n")
    assert len(learned(made)) == 1
    assert made.facts.tools_dropped == 0


@pytest.mark.parametrize(
    ("head", "tools", "written"),
    [
        ("", [ADD], False),
        ("You may call functions.\n{% if tools %}You have {{ tools | length }}.{% endif %}", [ADD], False),
        ("{{ tools[0].function.name }}", [ADD, {"name": "other"}], False),
        ("{{ tools | tojson }}", [ADD, {"name": "other"}], True),
        ("{% if not tools %}{{ raise_exception('none') }}{% endif %}{{ tools | tojson }}", [ADD], True),
        ("", [], True),
    ],
)
def test_tools_that_the_template_does_not_write(head: str, tools: list[Any], written: bool) -> None:
    """A name in a call is no sign that the function was described."""
    template = head + TOOLS
    if written:
        assert example(calling(tools), template, drop_tools=True).facts.tools_dropped == 0
        return
    with pytest.raises(
        DataError, match=r"here: the conversation has tools, and the chat template .* set chat.drop_tools"
    ):
        example(calling(tools), template)
    made = example(calling(tools), template, drop_tools=True)
    assert (made.facts.tools_dropped, made.facts.examples) == (1, 1)
    left_out = example(calling(tools), template, lenient=True)
    assert (left_out.facts.refused, left_out.facts.examples) == (1, 0)


# ---------------------------------------------------------------- a real tokenizer


def spacing() -> PreTrainedTokenizerFast:
    """A tokenizer in the form of Llama 2's: spaces are a character of their own, and one is put before every text."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bytes_too = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_too], show_progress=False
    )
    made.train([str(CONVERSATIONS / "sharegpt.json")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@KEEPS_THEM_APART
@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("template", [PLAIN, MISTRAL], ids=["plain", "mistral"])
def test_a_tokenizer_that_puts_spaces_before_texts(template: str, marked: bool) -> None:
    """Llama's own does, also behind special tokens; ids are those of transformers."""
    llama = spacing()
    llama.chat_template = template if marked else without_marks(template)
    found = find_template(llama, None, {})
    chat = ChatEncoder(llama, found, ChatSection(), row_length=9999, around=(None, None), tolerance=Tolerance(False))
    records = json.loads((CONVERSATIONS / "sharegpt.json").read_text())[:60]
    talks = [talk(*[turn["value"] for turn in record["conversations"]]) for record in records]
    talks += [talk(text, "yes </s> no") for text in ("Hello </s> there", "</s>", "a</s>b <s>", " </s>\n", "é\n\n</s>")]
    for conversation in talks:
        made = chat.encode(conversation.to_json().encode(), "here")
        theirs = llama.apply_chat_template(
            conversation.messages, sanitize_control_tokens=True, tokenize=True, return_dict=False
        )
        assert made.ids.tolist() == theirs
        said = [m["content"] for m in conversation.messages if m["role"] == "assistant"]
        # Its decoder leaves out a space before a special token.
        found_texts = [text.strip().replace(" </s>", "</s>") for text in learned(made, llama)]
        assert found_texts == [f"{text}</s>".replace(" </s>", "</s>") for text in said]


def test_an_empty_mark_learns_nothing() -> None:
    """Even where the line breaks on both sides of it are one token."""
    nothing = CHATML.replace(
        "message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n'", "'' }}{% endgeneration %}{{ message.content"
    )
    assert nothing != CHATML
    assert example(talk("Hello", "answer"), nothing).facts.unsupervised == 1


def test_marks_within_macros() -> None:
    """Where transformers' own count of characters begins anew."""
    inside = (
        "{%- macro turn(m) %}{{ '<|im_start|>' + m.role + '\\n' }}"
        "{%- if m.role == 'assistant' %}\n  {%- generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}\n"
        "{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endmacro %}"
        "{%- for m in messages %}{{ turn(m) }}{% endfor %}"
    )
    made = example(EXCHANGES, inside)
    assert made.ids.tolist() == example(EXCHANGES, CHATML).ids.tolist()
    assert learned(made) == ["The answer<|im_end|>", "forty two<|im_end|>"]


def test_marks_that_change_the_text_are_refused() -> None:
    trimmed = CHATML.replace("{{ message.content + '<|im_end|>' }}", "{{ message.content }}").replace(
        "{%- generation %}", "{%- filter trim %}{% generation %}"
    )
    trimmed = trimmed.replace("{% endgeneration %}", "{% endgeneration %}{% endfilter %}{{ '<|im_end|>' }}")
    assert learned(example(EXCHANGES, trimmed)) == ["The answer", "forty two"]
    with pytest.raises(DataError, match=r"here: .* writes another text around its \{% generation %\} marks"):
        example(talk("Hello", " the answer "), trimmed)

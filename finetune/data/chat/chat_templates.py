"""Chat templates: which one, whether it is well-formed, which parts of a conversation it writes, and where answers lie.

An answer is found by the template's own `{% generation %}` marks. A template without them is rendered once up to
each answer and once through it: what was added is the answer, if what came before has stayed the same.

To find the parts that are written, all are marked at once, and a part whose mark is in the text is written. One whose
mark is not, because the template shortens it or does without it, is replaced alone: it is not written where the text
stays as it was.
"""

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from finetune.data.chat.special_token_text import Marks, Span, change_texts, marks_for
from finetune.data.sources.conversation_formats import REASONING, Conversation, InvalidConversation
from finetune.data.text_issues import first_difference
from finetune.utils.bounded_work import bounded_work
from finetune.utils.errors import DataError
from finetune.utils.file_formats import read_text

SHIPPED = {file.stem: file for file in sorted(Path(__file__).with_name("templates").glob("*.jinja"))}
"""Files of the templates that ship, by their names; answers are marked in all of them."""

_MARK = re.compile(r"\{%(?P<left>[-+]?)\s*(?P<end>end)?generation\s*(?P<right>[-+]?)%\}")
# Templates that write today's date would give other rows each day. Llama 3's own date stands for all of them.
_NOW = re.compile(r"""strftime_now\(\s*(?P<quote>['"])(?P<format>.*?)(?P=quote)\s*\)""")
_DATE = datetime.date(2024, 7, 26)
_SHOWN = 60
Place = tuple[str | int, ...]

# What a model would learn wrongly, or without its reason, if it were not written. Of names, ids and the like, templates
# write what they need.
_NEEDED = ("content", "tool_calls", "tools", *REASONING)
_ANOTHER = "Mend the template, or name another as chat.template."


@dataclass(frozen=True)
class Template:
    """A chat template, checked."""

    text: str | None
    """None where the tokenizer has one for conversations with tools alone."""
    name: str
    """Its origin, for messages."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Special tokens, and what the recipe adds."""
    tool_use: str | None = None
    """The one for conversations with tools, where the tokenizer has one of its own for them."""

    def text_for(self, chat: Conversation, where: str) -> str:
        """The template of a conversation, as transformers chooses it.

        Raises:
            DataError: If there is none.
        """
        text = self.tool_use if chat.tools and self.tool_use is not None else self.text
        if text is None:
            raise DataError(
                f"{where}: the conversation has no tools, and {self.name} has a chat template named `tool_use` and "
                f"none named `default`. Set chat.template to a Jinja file, or to one that ships ({', '.join(SHIPPED)})."
            )
        return text

    def render(self, chat: Conversation, where: str, *, prompt: bool = False, marks: Marks | None = None) -> str:
        """A conversation as text; with `prompt`, up to where an answer would begin; with `marks`, around marked parts.

        Raises:
            DataError: If the template refuses it, or does not end.
        """
        template, variables = _fix_date(self.text_for(chat, where)), {**self.variables, **chat.variables}
        template = _show_marks(template, marks) if marks is not None else template
        try:
            with bounded_work(f"{where}: the chat template ({self.name})", _ANOTHER):
                texts, _ = render_jinja_template(
                    [chat.messages], tools=chat.tools, chat_template=template, add_generation_prompt=prompt, **variables
                )
        except DataError:
            raise
        except Exception as error:  # Whatever a template does with what it did not expect.
            reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
            roles = ", ".join(message["role"] for message in chat.messages[:8])
            raise InvalidConversation(
                "refused by the template",
                f"{where}: the chat template ({self.name}) refuses this conversation: {reason}. Its roles are {roles}. "
                "Mend the record, or name another template as chat.template.",
            ) from error
        return str(texts[0])

    def render_marked(self, chat: Conversation, where: str) -> tuple[str, list[Span]]:
        """A conversation as text, and the parts of it that are marked.

        Raises:
            DataError: If the template does something to what it marks.
        """
        # Transformers counts characters while a template writes, and begins anew in macros and the like.
        text = self.render(chat, where)
        marks = marks_for(text)
        marked = self.render(chat, where, marks=marks)
        clean, spans, _ = marks.remove(marked)
        if clean != text or marked.count(marks.open) != marked.count(marks.close):
            raise DataError(
                f"{where}: the chat template ({self.name}) writes another text around its {{% generation %}} marks "
                "than without them, so that it cannot be told what is marked. Move filters, such as `trim`, into them."
            )
        return text, spans


def find_template(tokenizer: PreTrainedTokenizerBase, given: str | None, variables: Mapping[str, Any]) -> Template:
    """The template that a recipe names.

    Args:
        given: A name in `SHIPPED`, a file, or None for the tokenizer's own.
        variables: Variables of the template, beside the tokenizer's special tokens.

    Raises:
        DataError: If there is none, or its syntax is wrong.
    """
    if given is None:
        texts, name = tokenizer.chat_template, "the tokenizer's own"
    else:
        advice = f"chat.template is a Jinja file, or one of {', '.join(SHIPPED)}."
        with DataError.explaining(f"The chat template {given} cannot be read", advice):
            texts, name = read_text(SHIPPED.get(given, Path(given))), given
    # By the names that transformers gives them.
    texts = {"default": texts} if isinstance(texts, str) else texts or {}
    if not texts.keys() & {"default", "tool_use"}:
        others = f" that is named `default` or `tool_use`, only {', '.join(sorted(texts))}" if texts else ""
        raise DataError(
            f"The tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template{others}. Set "
            f"chat.template to a Jinja file, or to one that ships ({', '.join(SHIPPED)})."
        )
    for text in texts.values():
        try:
            with bounded_work(f"The chat template ({name})", _ANOTHER):
                render_jinja_template([[{"role": "user", "content": "a"}]], chat_template=_fix_date(text))
        except DataError:
            raise
        except jinja2.TemplateSyntaxError as error:
            line = "".join(text.splitlines()[error.lineno - 1 : error.lineno]).strip()
            raise DataError(
                f"The chat template ({name}) has a syntax error in line {error.lineno}: {error.message}. The line is "
                f"`{_short(line)}`. Mend it, or name another as chat.template."
            ) from error
        except Exception:  # This conversation need not be to its taste; the syntax is right.
            pass
    tokens = {key: value for key, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}
    return Template(texts.get("default"), name, {**tokens, **variables}, texts.get("tool_use"))


def first_messages(chat: Conversation, number: int) -> Conversation:
    """A conversation's first messages."""
    return replace(chat, messages=chat.messages[:number])


def find_answers(
    template: Template, chat: Conversation, wanted: Sequence[int], special: re.Pattern[str], where: str
) -> tuple[str, dict[int, list[Span]]]:
    """A conversation as text, and where some of its answers lie.

    Args:
        wanted: Numbers of assistant messages.
        special: Matches special tokens that the template writes.
        where: File and record, for messages.

    Raises:
        DataError: If the answers cannot be told from the rest.
    """
    if _MARK.search(template.text_for(chat, where)):
        text, spans = template.render_marked(chat, where)
        answer_spans = _by_marks(template, chat, spans, wanted, where)
    else:
        text = template.render(chat, where)
        answer_spans = {n: [_by_prefix(template, chat, text, n, special, where)] for n in wanted}
    # Nothing is marked where a mark closes at once, even if that is in the midst of a token.
    return text, {n: [(start, end) for start, end in places if start < end] for n, places in answer_spans.items()}


def _by_marks(
    template: Template, chat: Conversation, spans: list[Span], wanted: Sequence[int], where: str
) -> dict[int, list[Span]]:
    spoken = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if len(spans) == len(spoken):
        answer_spans = {number: [span] for number, span in zip(spoken, spans, strict=True)}
    else:
        # A template may mark an answer in several pieces: count what each message adds.
        answer_spans, before = {}, 0
        for number in spoken:
            marked = len(template.render_marked(first_messages(chat, number + 1), where)[1])
            answer_spans[number] = spans[before:marked]
            before = marked
        if before != len(spans):
            raise DataError(
                f"{where}: the chat template ({template.name}) marks {len(spans)} parts of this conversation, and "
                f"{before} when it is read one turn at a time: it cannot be told which belongs to which of the "
                f"{len(spoken)} answers. Mend its {{% generation %}} marks, or name another as chat.template."
            )
    return {number: answer_spans[number] for number in wanted}


def _by_prefix(
    template: Template, chat: Conversation, text: str, number: int, special: re.Pattern[str], where: str
) -> Span:
    """The part of the text that a message adds to those before it."""
    before = template.render(first_messages(chat, number), where, prompt=True)
    through = text if number == len(chat.messages) - 1 else template.render(first_messages(chat, number + 1), where)
    for earlier, later, what in (
        (before, through, "its prompt for an answer is not how it then writes one"),
        (before, text, "it rewrites earlier turns when others follow"),
        (through, text, "it rewrites an answer when others follow"),
    ):
        if not later.startswith(earlier):
            same = max(0, first_difference(earlier, later) - 20)
            raise DataError(
                f"{where}, turn {number + 1}: the chat template ({template.name}) has no {{% generation %}} marks, and "
                f"{what}: `{_short(earlier[same:])}` became `{_short(later[same:])}`. So its answers cannot be told "
                "from the rest. Put marks around them in a copy of the template and name it as chat.template, or set "
                "chat.train_on: last, if only earlier turns are rewritten."
            )
    return len(before), _end_of(chat.messages[number], through, len(before), special)


def _end_of(message: Mapping[str, Any], text: str, start: int, special: re.Pattern[str]) -> int:
    """The end of an answer: behind the special token that closes it."""
    closing = [match.end() for match in special.finditer(text, start)]
    if closing:
        # Calls and thoughts may have special tokens of their own.
        return closing[-1] if message.keys() & {"tool_calls", *REASONING} else closing[0]
    content = str(message.get("content") or "").strip()
    position = text.find(content, start)
    return position + len(content) if content and position >= 0 else len(text)


def _short(text: str) -> str:
    line = text.replace("\n", "\\n")
    return line if len(line) <= _SHOWN else line[:_SHOWN] + " …"


@lru_cache
def _show_marks(text: str, marks: Marks) -> str:
    """A template that writes a character where a mark opens or closes, and treats white space as before."""

    def show(mark: re.Match[str]) -> str:
        character = marks.close if mark["end"] else marks.open
        nothing = "set finetune_mark = 0"  # a block, so that white space around it goes as it did
        return f"{{%{mark['left']} {nothing} %}}{{{{ '{character}' }}}}{{% {nothing} {mark['right']}%}}"

    return _MARK.sub(show, text)


@lru_cache
def _fix_date(text: str) -> str:
    return _NOW.sub(lambda match: repr(_DATE.strftime(match["format"])), text)


@dataclass(frozen=True)
class Part:
    """Something that a conversation says."""

    field: str
    """A field of messages, or `tools`."""
    turn: int | None
    """Number of the message, from 0."""
    paths: tuple[Place, ...]
    """Its place, or all places of a field that templates may do without."""


@dataclass(frozen=True)
class Writing:
    """A conversation as a template writes it."""

    chat: Conversation
    """The conversation, with the arguments of calls as the template takes them."""
    text: str
    missing: tuple[Part, ...]
    """Parts that the template does not write."""


def write_conversation(template: Template, chat: Conversation, where: str, *, prompt: bool = False) -> Writing:
    """Writes a conversation, and finds what of it is not written.

    Templates take the arguments of calls as objects, as transformers' own do, or as texts in JSON. Which of the two is
    tried: one that takes texts raises an error for objects, writes them as Python does, or not at all.

    Raises:
        DataError: If the template refuses the conversation in either form.
    """
    arguments = [call["arguments"] for call in _called(chat) if "arguments" in call]
    writings: list[Writing] = []
    problems: list[InvalidConversation] = []
    for form in (chat, _with_texts(chat)) if arguments else (chat,):
        try:
            writing = _written(template, form, where, prompt=prompt)
        except InvalidConversation as problem:
            problems.append(problem)
            continue
        writings.append(writing)
        as_python = any(given and str(given) in writing.text for given in arguments)
        if not as_python and all(part.field != "tool_calls" for part in writing.missing):
            break
    if not writings:
        raise problems[0]
    return min(reversed(writings), key=lambda writing: len(writing.missing))


def _called(chat: Conversation) -> Iterator[dict[str, Any]]:
    """The functions that are called, each with name and arguments."""
    for message in chat.messages:
        for call in message.get("tool_calls", ()):
            yield call.get("function", call)


def _with_texts(chat: Conversation) -> Conversation:
    tree = json.loads(json.dumps(chat.messages))
    converted = replace(chat, messages=tree)
    for call in _called(converted):
        if "arguments" in call:
            call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return converted


def _written(template: Template, chat: Conversation, where: str, *, prompt: bool) -> Writing:
    text = template.render(chat, where, prompt=prompt)
    raw = json.dumps([chat.messages, chat.tools])
    marks = marks_for(f"{raw}{text}{json.dumps([chat.messages, chat.tools], ensure_ascii=False)}")
    parts = list(_parts(chat))

    def changed(*numbers: int, alone: bool) -> str:
        tree = json.loads(raw)
        for number in numbers:
            for path in parts[number].paths:
                _change(tree, path, f"{marks.open}{number}{marks.close}", alone=alone)
        return template.render(replace(chat, messages=tree[0], tools=tree[1]), where, prompt=prompt)

    def unwritten(number: int) -> bool:
        try:
            return changed(number, alone=True) == text
        except InvalidConversation:
            return False  # it cannot do without

    needed = [number for number, part in enumerate(parts) if part.field in _NEEDED]
    try:
        matches = re.findall(f"{marks.open}([0-9]+){marks.close}", changed(*needed, alone=False))
        seen = set(map(int, matches))
    except InvalidConversation:
        seen = set()  # it does not take them as they are then
    missing = (part for number, part in enumerate(parts) if number not in seen and unwritten(number))
    return Writing(chat, text, tuple(missing))


def _change(tree: Any, path: Place, mark: str, *, alone: bool) -> None:
    """Marks what lies at a path; or, alone, leaves nothing of it but the mark."""
    *inner, key = path
    for step in inner:
        tree = tree[step]
    if isinstance(tree[key], str):
        text = tree[key].rstrip()
        tree[key] = mark if alone else f"{text}{mark}{tree[key][len(text) :]}"
    elif alone:
        del tree[key]
    elif isinstance(tree, dict):
        # Of arguments and properties, the name is written at least. All are renamed, so that they stay in order.
        tree[f"{key}{mark}"] = change_texts(tree.pop(key), lambda text: f"{text}{mark}")


def _parts(chat: Conversation) -> Iterator[Part]:
    others: dict[str, list[Place]] = {}
    for turn, message in enumerate(chat.messages):
        for kind, value in message.items():
            if kind == "tool_calls":
                for number, call in enumerate(value):
                    for path, key in _of_function(call, (0, turn, kind, number)):
                        if key in ("name", "arguments"):
                            yield Part(kind, turn, (path,))
                        elif key != "type":
                            others.setdefault(f"{kind}.{key}", []).append(path)
            elif kind in _NEEDED and isinstance(value, str):
                if value.strip():
                    yield Part(kind, turn, ((0, turn, kind),))
            elif kind != "role":
                others.setdefault(kind, []).append((0, turn, kind))
    for number, tool in enumerate(chat.tools or ()):
        paths = [path for path, key in _of_function(tool, (1, number)) if key in ("name", "description", "parameters")]
        for path in paths or [(1, number)]:
            yield Part("tools", None, (path,))
    for kind, all_paths in others.items():
        yield Part(kind, None, tuple(all_paths))


def _of_function(said: Any, path: Place) -> Iterator[tuple[Place, str]]:
    """Places in a call or a tool, with the key that each is of: of arguments and parameters, each one alone."""
    inner = said.get("function") if isinstance(said, dict) else None
    if isinstance(inner, dict):
        yield from (((*path, key), key) for key in said if key != "function")
        said, path = inner, (*path, "function")
    for key, value in said.items() if isinstance(said, dict) else ():
        if key == "parameters" and isinstance(value, dict):
            value, inner_path = value.get("properties"), (*path, key, "properties")
        else:
            inner_path = (*path, key)
        if isinstance(value, dict) and value:
            yield from (((*inner_path, name), key) for name in value)
        elif isinstance(value, str) and value.strip():
            yield inner_path, key

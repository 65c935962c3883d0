"""Finds the parts of a conversation that a chat template writes, and the form in which it takes arguments of calls.

All parts are marked at once, and a part whose mark is in the text is written. One whose mark is not, because the
template shortens it or does without it, is replaced alone: it is not written where the text stays as it was.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from finetune.data.chat.chat_templates import Template
from finetune.data.chat.special_token_text import marks_for
from finetune.data.sources.conversation_formats import REASONING, Conversation, InvalidConversation

Path = tuple[str | int, ...]

# What a model would learn wrongly, or without its reason, if it were not written. Of names, ids and the like, templates
# write what they need.
_NEEDED = ("content", "tool_calls", "tools", *REASONING)


@dataclass(frozen=True)
class Part:
    """Something that a conversation says."""

    field: str
    """A field of messages, or `tools`."""
    turn: int | None
    """Number of the message, from 0."""
    paths: tuple[Path, ...]
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
    objects: Writing | InvalidConversation
    try:
        objects = _written(template, chat, where, prompt=prompt)
    except InvalidConversation as problem:
        objects = problem
    arguments = [call["arguments"] for call in _called(chat) if "arguments" in call]
    if isinstance(objects, Writing) and not (
        any(given and str(given) in objects.text for given in arguments)
        or any(part.field == "tool_calls" for part in objects.missing)
    ):
        return objects
    if arguments:
        try:
            texts = _written(template, _with_texts(chat), where, prompt=prompt)
        except InvalidConversation:
            texts = None
        if texts is not None and (
            isinstance(objects, InvalidConversation) or len(texts.missing) <= len(objects.missing)
        ):
            return texts
    if isinstance(objects, InvalidConversation):
        raise objects
    return objects


def _called(chat: Conversation) -> Iterator[dict[str, Any]]:
    """The functions that are called, each with name and arguments."""
    for message in chat.messages:
        for call in message.get("tool_calls", ()):
            yield call.get("function", call)


def _with_texts(chat: Conversation) -> Conversation:
    tree = json.loads(json.dumps(chat.messages))
    found = replace(chat, messages=tree)
    for call in _called(found):
        if "arguments" in call:
            call["arguments"] = json.dumps(call["arguments"], ensure_ascii=False)
    return found


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
        found = re.findall(f"{marks.open}([0-9]+){marks.close}", changed(*needed, alone=False))
        seen = set(map(int, found))
    except InvalidConversation:
        seen = set()  # it does not take them as they are then
    missing = (part for number, part in enumerate(parts) if number not in seen and unwritten(number))
    return Writing(chat, text, tuple(missing))


def _change(tree: Any, path: Path, mark: str, *, alone: bool) -> None:
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
        tree[f"{key}{mark}"] = _marked(tree.pop(key), mark)


def _marked(value: Any, mark: str) -> Any:
    if isinstance(value, dict):
        return {key: _marked(inner, mark) for key, inner in value.items()}
    if isinstance(value, list):
        return [_marked(inner, mark) for inner in value]
    return f"{value}{mark}" if isinstance(value, str) else value


def _parts(chat: Conversation) -> Iterator[Part]:
    others: dict[str, list[Path]] = {}
    for turn, message in enumerate(chat.messages):
        for field, value in message.items():
            if field == "tool_calls":
                for number, call in enumerate(value):
                    for path, key in _of_function(call, (0, turn, field, number)):
                        if key in ("name", "arguments"):
                            yield Part(field, turn, (path,))
                        elif key != "type":
                            others.setdefault(f"{field}.{key}", []).append(path)
            elif field in _NEEDED and isinstance(value, str):
                if value.strip():
                    yield Part(field, turn, ((0, turn, field),))
            elif field != "role":
                others.setdefault(field, []).append((0, turn, field))
    for number, tool in enumerate(chat.tools or ()):
        paths = [path for path, key in _of_function(tool, (1, number)) if key in ("name", "description", "parameters")]
        for path in paths or [(1, number)]:
            yield Part("tools", None, (path,))
    for field, found in others.items():
        yield Part(field, None, tuple(found))


def _of_function(said: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Places in a call or a tool, with the key that each is of: of arguments and parameters, each one alone."""
    inner = said.get("function") if isinstance(said, dict) else None
    if isinstance(inner, dict):
        yield from (((*path, key), key) for key in said if key != "function")
        said, path = inner, (*path, "function")
    for key, value in said.items() if isinstance(said, dict) else ():
        if key == "parameters" and isinstance(value, dict):
            value, place = value.get("properties"), (*path, key, "properties")
        else:
            place = (*path, key)
        if isinstance(value, dict) and value:
            yield from (((*place, name), key) for name in value)
        elif isinstance(value, str) and value.strip():
            yield place, key

"""Records of several formats to one: messages with `role` and `content`, as JSON, which is hashed and stored.

Roles are `system`, `user`, `assistant` and `tool`. Beside its messages a conversation has a weight for each of
them, 0 or more, the tools that it may call, the number of the first message that is its completion, and variables of
its own for the chat template.

A key that holds null is the same as no key, in every format: Arrow (Parquet, `save_to_disk`) fills in each key that any
other record has. In JSON that is given as a text, which Arrow leaves alone, null is null.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.data.sources.column_names import PREFERENCES, as_overrides, guess_chat_fields
from finetune.utils.errors import DataError

FORMAT_VERSION = 3
"""Version of the reading of records; part of the cache's key."""

AS_IT_IS = "record"
"""Format of a `RecordForm` that returns records as they are, without nulls."""

ROLES = {
    name: role
    for role, names in {
        "system": "system developer",
        "user": "user human",
        "assistant": "assistant gpt chatgpt bot ai model function_call",
        "tool": "tool function observation ipython",
    }.items()
    for name in names.split()
}
"""Names of speakers in small letters, and their roles."""

# The first whose fields a source's first record has is the source's format.
_FORMATS: tuple[tuple[str, dict[str, str]], ...] = (
    ("messages", {"messages": "messages"}),
    ("sharegpt", {"messages": "conversations"}),
    ("sharegpt", {"messages": "conversation"}),
    ("alpaca", {"user": "instruction", "input": "input", "assistant": "output"}),
    ("prompt", {"user": "prompt", "assistant": "completion"}),
    ("prompt", {"user": "prompt", "assistant": "response"}),
    ("pairs", {"user": "question", "assistant": "answer"}),
    ("text", {"text": "text"}),
)
# May be missing from a record.
_OPTIONAL = ("input", "system", "tools", "functions", "history", "chat_template_kwargs")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of what a model thinks before it answers."""
# Whether a message or a record is learned: OpenAI's, axolotl's two, ms-swift's.
_WEIGHTS = ("weight", "train", "training", "loss")
# The same said in another way: in parts of a message, by degrees, or by one that is 0 where something is learned.
_OTHER_WEIGHTS = ("train_detail", "training_detail", "loss_scale", "loss_weight", "loss_mask", "mask", "masked")
MOST_WEIGHT = 1e6
"""What a document or an answer counts at most."""
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
# Of preference data: whether an answer is a good one.
_VERDICTS = ("label", "kto_tag")
# Given to templates by whoever renders them.
_RESERVED = ("messages", "conversations", "tools", "chat_template", "add_generation_prompt", "continue_final_message")
ABSENT = object()
"""What `find_value` returns where there is no value."""


class InvalidConversation(DataError):
    """One conversation cannot be used as it is."""

    def __init__(self, kind: str, text: str) -> None:
        """`kind` is a few words for the report, `text` the whole paragraph."""
        super().__init__(text)
        self.kind = kind


@dataclass
class Tolerance:
    """The way to treat broken conversations."""

    lenient: bool = False
    """True if they are left out."""
    counts: Counter[str] = field(default_factory=Counter)
    """Number of those that were left out, by kind."""
    first: str | None = None
    """The problem of the first one."""

    def restore(self, counts: Mapping[str, int], first: str | None) -> None:
        """Replaces what was counted by what another process has counted, or by nothing."""
        self.counts, self.first = Counter(counts), first

    def meet(self, problem: InvalidConversation) -> None:
        """Counts a problem, or raises it if nothing is tolerated."""
        if not self.lenient:
            raise problem
        self.counts[problem.kind] += 1
        self.first = self.first or str(problem)


@dataclass(frozen=True)
class Conversation:
    """The content of one record."""

    messages: list[dict[str, Any]]
    weights: list[float]
    """Factors of the losses of answers; all others have that of the record, or 0."""
    tools: list[Any] | None
    completion: int
    """Number of the first message that answers the prompt."""
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables that the record gives the chat template: its `chat_template_kwargs`."""

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        # Without variables as it was before there were any: by its hash, a conversation is held out or not.
        tree = {key: value for key, value in vars(self).items() if key != "variables" or value}
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> "Conversation | str":
        """A conversation; or the text of a document that is none, of both that are a pair, or of a preference."""
        tree = json.loads(text)
        if isinstance(tree, list):
            return " ".join(tree)
        if "prompt" in tree:
            answers = (tree.get(name) or "" for name in ("prompt", "chosen", "rejected", "completion"))
            turns = (turn for one in answers for turn in ([one] if isinstance(one, str) else one))
            return "\n".join(turn if isinstance(turn, str) else str(turn.get("content", "")) for turn in turns)
        return str(tree["text"]) if "text" in tree else Conversation(**tree)


@dataclass
class RecordForm:
    """The way to read the records of one source. The first record decides what the recipe leaves open."""

    format: str
    """A format, or `auto`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Paths of fields that are not where the format has them."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """More names of speakers."""
    text_field: str = "text"
    strip: bool = True
    """True if white space around documents of plain text goes."""
    tolerance: Tolerance = field(default_factory=Tolerance)
    source: str = ""
    """Key of the recipe's source, such as `data.train.0`, for error messages; empty where it is not known."""
    detected: str = ""
    """The format, once a record was read."""
    unread: set[str] = field(default_factory=set)
    """Fields of records that hold something and are not read."""
    _paths: dict[str, str] = field(default_factory=dict)
    """Paths of the fields that are read, by their meaning, once a record was read."""

    def fingerprint(self) -> list[Any]:
        """Lists all that decides how a record is read."""
        return [FORMAT_VERSION, self.format, dict(self.fields), dict(self.roles), self.text_field, self.strip]

    def read(self, record: Any, where: str) -> str:
        """A record as JSON; an empty text if it is broken and that is tolerated.

        Raises:
            DataError: If it is in no known format, or broken.
        """
        if isinstance(record, str):
            if self.format not in ("text", AS_IT_IS):
                raise DataError(
                    f"{where}: this is a bare text, and with a `chat` section records are conversations: objects with "
                    "fields. To learn every token of such texts as documents, set the source's `format` to `text`."
                )
            record = {self.text_field: record}
        if not isinstance(record, Mapping):
            raise DataError(f"{where}: a conversation is an object with fields, got {type(record).__name__}.")
        try:
            record = without_nulls(record, where)
            if self.format == AS_IT_IS:
                return json.dumps(record, ensure_ascii=False, default=str)
            if {"chosen", "rejected"} <= record.keys() and not self.fields:
                raise DataError(f"{where}: {PREFERENCES}")
            if not self.detected:
                self._detect(record, where)
            read = {path if path in record else path.partition(".")[0] for path in self._paths.values()}
            if self.detected != "text":
                read.update((_WEIGHTS[0], *_VERDICTS))
            self.unread.update(key for key, value in record.items() if key not in read and value not in ("", [], {}))
            if self.detected == "text":
                text = self._text(record, "text", where)
                return json.dumps({"text": text.strip() if self.strip else text}, ensure_ascii=False)
            conversation = self._conversation(record, where)
            _check(conversation, where)
            try:
                return conversation.to_json()
            except (TypeError, RecursionError) as error:  # Formats that are not JSON hold dates, for example.
                raise InvalidConversation(
                    "no JSON", f"{where}: messages or tools hold what JSON cannot: {error}. Write it as text."
                ) from error
        except InvalidConversation as problem:
            self.tolerance.meet(problem)
            return ""

    def _detect(self, record: Mapping[str, Any], where: str) -> None:
        """Finds the format of a source by its first record, and where in it the fields lie."""
        auto, given = self.format == "auto", {k: v for k, v in self.fields.items() if k not in ("role", "content")}
        known = [(name, {**paths, **given}) for name, paths in _FORMATS if auto or self.format == name]
        known = [(name, {"text": self.text_field} if name == "text" else paths) for name, paths in known]
        if auto and ("messages" in given or {"user", "assistant"} <= given.keys()):
            fitting = [("pairs", given)]
        else:
            fitting = [(name, paths) for name, paths in known if _has_fields(record, paths)]
        if not fitting:
            wanted = "; ".join(f"{n}: {', '.join(p for k, p in paths.items() if k != 'input')}" for n, paths in known)
            advice = "such as {user: question, assistant: answers.0} or {messages: chat.turns}"
            if guess := guess_chat_fields(record):
                advice = f"such as {as_overrides(self.source, {f'fields.{key}': name for key, name in guess.items()})}"
            raise DataError(
                f"{where}: the fields are {_names(record)}, and no format has these. Known are {wanted}. Name the "
                f"fields in the source's `fields`, {advice}."
            )
        self.detected, self._paths = fitting[0]
        if auto and "messages" in self._paths:
            turns = find_value(record, self._paths["messages"])
            first = turns[0] if isinstance(turns, list) and turns else {}
            shared = isinstance(first, Mapping) and "from" in first and "role" not in first
            self.detected = "sharegpt" if shared else "messages"
        if self.detected != "text":
            of_pairs = ("input", "history")  # `input` is a common name, which means this in Alpaca's format only
            kept = (key for key in _OPTIONAL if key not in of_pairs[: 2 if "messages" in self._paths else 1])
            self._paths = {**{key: key for key in kept}, **self._paths}

    def _conversation(self, record: Mapping[str, Any], where: str) -> Conversation:
        messages, weights, completion = self._spoken(record, where)
        _refuse_media(record, where)
        for name in _VERDICTS:
            if str(record.get(name)).lower() == "false":
                raise InvalidConversation(
                    "a bad answer",
                    f"{where}: `{name}` is false, which marks an answer as a bad one. Leave such records out.",
                )
        if system := self._text(record, "system", where):
            messages = [{"role": "system", "content": system}, *messages]
            weights, completion = [1, *weights], completion + 1
        if (factor := _weight({"weight": record.get("weight", 1)}, where)) != 1:
            weights = [weight * factor for weight in weights]
        variables = self._json(record, "chat_template_kwargs", dict, where) or {}
        if taken := [name for name in _RESERVED if name in variables]:
            raise InvalidConversation(
                "template variables",
                f"{where}: '{self._path('chat_template_kwargs')}' sets {', '.join(taken)}, which the template is given "
                "with the conversation. Remove it there.",
            )
        return Conversation(messages, weights, self._tools(record, where), completion, variables)

    def _spoken(self, record: Mapping[str, Any], where: str) -> tuple[list[dict[str, Any]], list[float], int]:
        """The turns of a record, their weights, and the number of the first that is the completion."""
        if "messages" in self._paths:
            turns = self._value(record, "messages", where)
            if not isinstance(turns, list | tuple) or not turns:
                raise InvalidConversation(
                    "no turns", f"{where}: '{self._path('messages')}' must be a list of turns, got {kind_of(turns)}."
                )
            messages, weights = self._turns(turns, where)
            users = (number for number, message in enumerate(messages, start=1) if message["role"] == "user")
            return messages, weights, max(users, default=0)
        prompt, answer = self._value(record, "user", where), self._value(record, "assistant", where)
        if isinstance(prompt, list) and isinstance(answer, list):
            return *self._turns([*prompt, *answer], where), len(prompt)
        question = self._text(record, "user", where)
        if "input" in self._paths and (more := self._text(record, "input", where).strip()):
            question = f"{question}\n\n{more}"
        texts: list[Any] = []
        for pair in self._json(record, "history", list, where) or []:  # as LLaMA-Factory has it
            if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
                raise InvalidConversation(
                    "no text",
                    f"{where}: '{self._path('history')}' must be a list of pairs of texts, a question and its answer.",
                )
            texts += pair
        texts += [question, self._text(record, "assistant", where)]
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        return messages, [1] * len(messages), len(messages) - 1

    def _turns(self, turns: Iterable[Any], where: str) -> tuple[list[dict[str, Any]], list[float]]:
        messages, weights = [], list[float]()
        who, what = ("from", "value") if self.detected == "sharegpt" else ("role", "content")
        who, what = self.fields.get("role", who), self.fields.get("content", what)
        known = {**ROLES, **self.roles}
        for number, turn in enumerate(turns, start=1):
            origin = f"{where}, turn {number}"
            if not isinstance(turn, Mapping) or who not in turn:
                got = ", ".join(turn) if isinstance(turn, Mapping) else kind_of(turn)
                raise InvalidConversation(
                    "missing field",
                    f"{origin}: a turn of format {self.detected} has the fields {who} and {what}, got {got}. Mend the "
                    "record, or set the source's `format`.",
                )
            name = turn[who]
            role = known.get(name, known.get(name.lower())) if isinstance(name, str) else None
            if role is None:
                raise InvalidConversation(
                    "unknown role",
                    f"{origin}: the role is '{name}'; known are {', '.join(known)}. Mend the record, or say whose role "
                    f"it is: chat.roles: {{{name}: ROLE}}, where ROLE is system, user, assistant or tool.",
                )
            if name.lower() == "function_call" and name not in self.roles and what in turn:
                call = _parsed(turn[what], f"{origin}: '{what}'")
                functions = call if isinstance(call, list) else [call]
                if not all(isinstance(function, Mapping) and "name" in function for function in functions):
                    raise InvalidConversation(
                        "tool calls",
                        f"{origin}: a function_call is an object with a name and arguments, or a list of them.",
                    )
                calls = [{"type": "function", "function": function} for function in functions]
                turn = {**{key: value for key, value in turn.items() if key != what}, "tool_calls": calls}
            message = {"role": role, **self._more(turn, (who, what), origin)}
            if what in turn or "tool_calls" not in message:
                message["content"] = _content(turn.get(what, ABSENT), what, turn, origin)
            messages.append(message)
            weights.append(_weight(turn, origin, role=message["role"]))
        return messages, weights

    def _more(self, turn: Mapping[str, Any], known: Sequence[str], place: str) -> dict[str, Any]:
        """Collects the fields of a message besides role and text: templates may read any of them."""
        _refuse_media(turn, place)
        extras: dict[str, Any] = {}
        for key, value in turn.items():
            if key in (*known, *_WEIGHTS, "id") or value in ("", [], {}):
                continue
            if key == "tool_calls":
                extras[key] = _calls(value, f"{place}: '{key}'")
            elif key == "function_call" and "tool_calls" not in turn:  # OpenAI's older form
                extras["tool_calls"] = _calls([{"type": "function", "function": value}], f"{place}: '{key}'")
            elif _is_json(value):
                extras[key] = value
            else:
                self.unread.add(f"{key} of messages")
        # Transformers gives them to templates under each other's names.
        return {k: v for k, v in extras.items() if k not in REASONING[1:] or v != extras.get(REASONING[0])}

    def _text(self, record: Mapping[str, Any], key: str, where: str) -> str:
        value = self._value(record, key, where)
        if value is None and key in _OPTIONAL:
            return ""
        if not isinstance(value, str):
            raise InvalidConversation("no text", f"{where}: '{self._path(key)}' must be a text, got {kind_of(value)}.")
        return value

    def _tools(self, record: Mapping[str, Any], where: str) -> list[Any] | None:
        key = "tools" if find_value(record, self._path("tools")) is not ABSENT else "functions"
        tools = []
        for tool in self._json(record, key, list, where) or []:
            tool = _parsed(tool, f"{where}: a tool of '{self._path(key)}'")
            if isinstance(tool, Mapping):
                tool = _with_object(tool, "parameters", f"{where}: tools")
            tools.append(tool if key == "tools" else {"type": "function", "function": tool})
        return tools or None

    def _json(self, record: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
        """An object or a list, which may be written as a text in JSON, as CSV has to; None where there is none."""
        origin = f"{where}: '{self._path(key)}'"
        value = self._value(record, key, where)
        value = None if isinstance(value, str) and not value.strip() else _parsed(value, origin)
        if value is not None and not isinstance(value, kind):
            wanted = "an object" if kind is dict else "a list"
            raise InvalidConversation(key, f"{origin} must be {wanted}, got {kind_of(value)}.")
        return value

    def _path(self, key: str) -> str:
        return self._paths.get(key, key)

    def _value(self, record: Mapping[str, Any], key: str, where: str) -> Any:
        value = find_value(record, self._path(key))
        if value is not ABSENT:
            return value
        if key in _OPTIONAL and key not in self.fields:
            return None
        raise InvalidConversation(
            "missing field",
            f"{where}: there is no field '{self._path(key)}' (read as {self.detected}); the fields are "
            f"{_names(record)}. A null counts as no field. Mend the record, or name another field: the source's "
            f"fields: {{{key}: …}}.",
        )


def find_format(record: Mapping[str, Any]) -> str | None:
    """Returns the format that `auto` takes a record for; None if none fits."""
    return next((name for name, paths in _FORMATS if _has_fields(record, paths)), None)


def _has_fields(record: Mapping[str, Any], paths: Mapping[str, str]) -> bool:
    return all(key in _OPTIONAL or find_value(record, path) is not ABSENT for key, path in paths.items())


def without_nulls(value: Any, where: str) -> Any:
    """A record without the keys, at any depth, that hold null. Items of lists stay.

    Raises:
        InvalidConversation: If it is nested too deeply.
    """
    try:
        if isinstance(value, Mapping):
            return {key: without_nulls(inner, where) for key, inner in value.items() if inner is not None}
        return [without_nulls(inner, where) for inner in value] if isinstance(value, list) else value
    except RecursionError as error:
        raise InvalidConversation("nested too deeply", f"{where}: the record is nested too deeply.") from error


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, str | int | float)


def _parsed(value: Any, place: str) -> Any:
    """Parses a text in JSON; returns anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidConversation(
            "JSON in a text", f"{place} is not valid JSON: {error}. Mend the text, or write it as an object or a list."
        ) from error


def _with_object(whole: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    """The same with an object at a key of it, or of its `function`, though it may be written as a text in JSON."""
    if isinstance(inner := whole.get("function"), Mapping):
        return {**whole, "function": _with_object(inner, key, place)}
    value = _parsed(whole[key], f"{place}, '{key}'") if key in whole else {}
    if not isinstance(value, Mapping):
        raise InvalidConversation(key, f"{place}, '{key}' must be an object, got {kind_of(value)}.")
    return {name: value if name == key else inner for name, inner in whole.items()}


def _calls(value: Any, place: str) -> list[Any]:
    """Calls of tools, with objects as arguments: OpenAI writes these as texts in JSON."""
    calls = _parsed(value, place)
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidConversation("tool calls", f"{place} must be a list of objects, got {kind_of(calls)}.")
    return [_with_object(call, "arguments", place) for call in calls]


def find_value(record: Any, path: str) -> Any:
    """Finds the value at a path such as `instances.0.output`; returns a mark of its own where there is none."""
    if isinstance(record, Mapping) and path in record:
        return record[path]
    head, _, rest = path.partition(".")
    if isinstance(record, Mapping) and rest and head in record:
        return find_value(record[head], rest)
    if isinstance(record, list) and head.isdecimal() and int(head) < len(record):
        return find_value(record[int(head)], rest) if rest else record[int(head)]
    return ABSENT


def _content(value: Any, key: str, turn: Mapping[str, Any], place: str) -> str:
    if isinstance(value, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if isinstance(value, str):
        return value
    if value is ABSENT:
        raise InvalidConversation(
            "missing field", f"{place}: there is no field '{key}'; there are {', '.join(turn)}. A null counts as none."
        )
    raise InvalidConversation(
        "no text", f"{place}: '{key}' must be a text, got {kind_of(value)}. Only text can be read."
    )


def _refuse_media(place_of: Mapping[str, Any], place: str) -> None:
    for key in _MEDIA:
        if place_of.get(key):
            raise InvalidConversation(
                "no text", f"{place}: it has '{key}', and only text can be read. Remove the field, or the record."
            )


def _weight(said: Mapping[str, Any], place: str, *, role: str = "assistant") -> float:
    """Returns the factor of the losses of a turn or a record: 0 if it is not learned, and else 1 or what it says."""
    for key in _OTHER_WEIGHTS if role == "assistant" else ():
        if said.get(key) not in (None, [], ""):
            raise InvalidConversation(
                "weight",
                f"{place}: '{key}' says what of an answer is learned in a way that is not read. Write `weight: 1` for "
                "one that is learned, `weight: 0` for one that is not and another number for what it counts, or remove "
                "it.",
            )
    given = {key: said[key] for key in _WEIGHTS if key in said}
    weighed = type(given.get("weight")) in (int, float) and 0 <= given["weight"] < MOST_WEIGHT and role == "assistant"
    known = all(value in (0, 1) or (key == "weight" and weighed) for key, value in given.items())
    if not known or len(set(given.values())) > 1:
        shown = ", ".join(f"the {key} is {value!r}" for key, value in given.items())
        raise InvalidConversation(
            "weight",
            f"{place}: {shown}; a message or a record is learned (1, true) or not (0, false), or the `weight` of a "
            "record or an answer is what it counts, a number from 0 to a million. Write one.",
        )
    if role != "assistant" and any(given.get(key) for key in ("train", "training")):
        raise InvalidConversation(
            "weight",
            f"{place}: this turn of role {role} is to be learned, and single turns can be chosen among answers only. "
            "Remove the field; `chat.train_on: all` learns every turn.",
        )
    weight = next(iter(given.values()), 1)
    return int(weight) if weight in (0, 1) else float(weight)


def _check(conversation: Conversation, where: str) -> None:
    """Rules that hold for every format."""
    roles = [message["role"] for message in conversation.messages]
    if "system" in roles[1:]:
        what = "there are two system turns" if roles.count("system") > 1 else "the system turn is not the first"
        number = len(roles) - roles[::-1].index("system")
        raise InvalidConversation(
            "system turns",
            f"{where}, turn {number}: {what}, and a conversation has at most one, at its start. Join them, or cut the "
            "record in two.",
        )
    for number, (message, weight) in enumerate(zip(conversation.messages, conversation.weights, strict=True), start=1):
        needed = message["role"] == "assistant" and weight and not message.get("tool_calls")
        if needed and not message["content"].strip():
            raise InvalidConversation(
                "empty answer",
                f"{where}, turn {number}: the answer is empty. Remove the record, or give this turn `weight: 0`.",
            )


def _names(record: Any) -> str:
    return ", ".join(list(_paths(record, ""))[:20]) or "none"


def _paths(value: Any, prefix: str) -> Iterator[str]:
    """The paths of what a record holds; of a list the first item's."""
    inner = value if isinstance(value, Mapping) else {"0": value[0]} if isinstance(value, list) and value else {}
    if not inner or prefix.count(".") >= 4:
        yield prefix[:-1]
        return
    for key, child in inner.items():
        yield from _paths(child, f"{prefix}{key}.")


def kind_of(value: Any) -> str:
    """Names the kind of a record's value, in JSON's words."""
    if value is None:
        return "nothing (null)"
    names = {list: "a list", dict: "an object", str: "a text", int: "a number", float: "a number"}
    name = names.get(type(value), f"a {type(value).__name__}")
    return f"an empty {name.split()[1]}" if type(value) in (list, dict, str) and not value else name

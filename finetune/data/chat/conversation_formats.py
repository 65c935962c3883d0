"""Records of several formats to one: messages with `role` and `content`, as JSON, which is hashed and stored.

Roles are `system`, `user`, `assistant` and `tool`. Beside its messages a conversation has a weight for each of
them, 0 or 1, the tools that it may call, and the number of the first message that is its completion.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetune.utils import json_files
from finetune.utils.errors import DataError

FORMAT_VERSION = 1
"""Of what is made of records; part of the cache's key."""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Names of speakers, and their roles."""

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
_OPTIONAL = {"input": "input", "system": "system", "tools": "tools"}
# What templates read of a message. Others, such as an id, are of no use to them.
_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
_ABSENT = object()


class InvalidConversation(DataError):
    """One conversation cannot be used as it is."""

    def __init__(self, kind: str, text: str) -> None:
        """`kind` is a few words for the report, `text` the whole paragraph."""
        super().__init__(text)
        self.kind = kind


@dataclass
class Tolerance:
    """What is done about broken conversations."""

    lenient: bool
    """Whether they are left out."""
    counts: Counter[str] = field(default_factory=Counter)
    """How many were left out, of each kind."""
    first: str | None = None
    """What was wrong with the first one."""

    def reset(self) -> None:
        """Forgets what was counted."""
        self.counts.clear()
        self.first = None

    def restore(self, counts: Mapping[str, int], first: str | None) -> None:
        """Takes what another process has counted instead of what this one has."""
        self.counts = Counter(counts)
        self.first = first

    def meet(self, problem: InvalidConversation) -> None:
        """Raises it, or counts it.

        Raises:
            InvalidConversation: If nothing is tolerated.
        """
        if not self.lenient:
            raise problem
        self.counts[problem.kind] += 1
        self.first = self.first or str(problem)


@dataclass(frozen=True)
class Conversation:
    """What one record says."""

    messages: list[dict[str, Any]]
    weights: list[int]
    tools: list[Any] | None
    completion: int
    """Number of the first message that answers the prompt."""

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(vars(self), ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> "Conversation | str":
        """A conversation; or the text of a document that is none."""
        tree = json.loads(text)
        return str(tree["text"]) if "text" in tree else Conversation(**tree)


@dataclass
class RecordForm:
    """How the records of one source are read. The first one decides what is left open."""

    format: str
    """A format, or `auto`."""
    fields: Mapping[str, str]
    """Paths of fields that are not where the format has them."""
    roles: Mapping[str, str]
    """More names of speakers."""
    text_field: str
    strip: bool
    """Whether white space around documents of plain text goes."""
    tolerance: Tolerance
    detected: str = ""
    """The format, once a record was read."""
    _paths: dict[str, str] = field(default_factory=dict)

    def fingerprint(self) -> list[Any]:
        """What decides what becomes of a record."""
        return [FORMAT_VERSION, self.format, dict(self.fields), dict(self.roles), self.text_field, self.strip]

    def read(self, record: Any, where: str) -> str:
        """A record as JSON; an empty text if it is broken and that is tolerated.

        Raises:
            DataError: If it is in no known format, or broken.
        """
        if isinstance(record, str):
            if self.format != "text":
                raise DataError(
                    f"{where}: this is a bare text, and with a `chat` section records are conversations: objects with "
                    "fields. To learn every token of such texts as documents, set the source's `format` to `text`."
                )
            record = {self.text_field: record}
        if not isinstance(record, Mapping):
            raise DataError(f"{where}: a conversation is an object with fields, got {type(record).__name__}.")
        if not self.detected:
            self.detected, self._paths = self._detect(record, where)
        try:
            if self.detected == "text":
                text = self._text(record, "text", where)
                return json.dumps({"text": text.strip() if self.strip else text}, ensure_ascii=False)
            conversation = self._messages(record, where) if "messages" in self._paths else self._pair(record, where)
            _check(conversation, where)
            return _written(conversation, where)
        except InvalidConversation as problem:
            self.tolerance.meet(problem)
            return ""

    def _detect(self, record: Mapping[str, Any], where: str) -> tuple[str, dict[str, str]]:
        given = dict(self.fields)
        if self.format == "auto" and ("messages" in given or {"user", "assistant"} <= given.keys()):
            return _listed(record, given) if "messages" in given else "pairs", given
        known = [(name, {**paths, **given}) for name, paths in _FORMATS if self.format in ("auto", name)]
        known = [(n, {"text": self.text_field} if n == "text" else paths) for n, paths in known]
        for name, paths in known:
            if all(find(record, path) is not _ABSENT for key, path in paths.items() if key not in _OPTIONAL):
                found = _listed(record, paths) if self.format == "auto" and "messages" in paths else name
                return found, paths
        wanted = "; ".join(f"{name}: {', '.join(p for k, p in paths.items() if k != 'input')}" for name, paths in known)
        raise DataError(
            f"{where}: the fields are {_names(record)}, and no format has these. Known are {wanted}. Name the fields "
            "in the source's `fields`, such as {user: question, assistant: answers.0} or {messages: chat.turns}."
        )

    def _messages(self, record: Mapping[str, Any], where: str) -> Conversation:
        turns = self._value(record, "messages", where)
        if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
            raise InvalidConversation(
                "no turns", f"{where}: '{self._paths['messages']}' must be a list of turns, got {kind_of(turns)}."
            )
        messages, weights = self._turns(turns, where)
        if system := self._text(record, "system", where):
            messages.insert(0, {"role": "system", "content": system})
            weights.insert(0, 1)
        return Conversation(messages, weights, self._tools(record, where), _completion(messages))

    def _pair(self, record: Mapping[str, Any], where: str) -> Conversation:
        prompt = self._value(record, "user", where)
        answer = self._value(record, "assistant", where)
        if isinstance(prompt, list) and isinstance(answer, list):
            messages, weights = self._turns([*prompt, *answer], where)
            return Conversation(messages, weights, self._tools(record, where), len(prompt))
        question = self._text(record, "user", where)
        if more := self._text(record, "input", where).strip():
            question = f"{question}\n\n{more}"
        messages = [{"role": "user", "content": question}]
        if system := self._text(record, "system", where):
            messages.insert(0, {"role": "system", "content": system})
        messages.append({"role": "assistant", "content": self._text(record, "assistant", where)})
        return Conversation(messages, [1] * len(messages), self._tools(record, where), len(messages) - 1)

    def _turns(self, turns: Iterable[Any], where: str) -> tuple[list[dict[str, Any]], list[int]]:
        messages, weights = [], []
        for number, turn in enumerate(turns, start=1):
            place = f"{where}, turn {number}"
            who, what = ("from", "value") if self.detected == "sharegpt" else ("role", "content")
            if not isinstance(turn, Mapping) or who not in turn:
                got = ", ".join(turn) if isinstance(turn, Mapping) else kind_of(turn)
                raise InvalidConversation(
                    "missing field",
                    f"{place}: a turn of format {self.detected} has the fields {who} and {what}, got {got}. Mend the "
                    "record, or set the source's `format`.",
                )
            message = {"role": self._role(turn[who], place)}
            message |= {key: turn[key] for key in _KEPT if turn.get(key)}
            if turn.get(what) is not None or "tool_calls" not in message:
                message["content"] = _content(turn.get(what, _ABSENT), what, turn, place)
            messages.append(message)
            weights.append(_weight(turn, place))
        return messages, weights

    def _role(self, name: Any, place: str) -> str:
        known = {**ROLES, **self.roles}
        role = known.get(name) if isinstance(name, str) else None
        if role is None:
            raise InvalidConversation(
                "unknown role",
                f"{place}: the role is '{name}'; known are {', '.join(known)}. Mend the record, or say whose role it "
                f"is: chat.roles: {{{name}: user}}.",
            )
        return role

    def _text(self, record: Mapping[str, Any], key: str, where: str) -> str:
        value = self._value(record, key, where)
        if value is None and key in _OPTIONAL:
            return ""
        if not isinstance(value, str):
            raise InvalidConversation("no text", f"{where}: '{self._path(key)}' must be a text, got {kind_of(value)}.")
        return value

    def _tools(self, record: Mapping[str, Any], where: str) -> list[Any] | None:
        tools = self._value(record, "tools", where)
        try:
            tools = json_files.parse(tools) if isinstance(tools, str) and tools.strip() else tools
        except ValueError as error:
            raise InvalidConversation(
                "tools", f"{where}: '{self._path('tools')}' is not valid JSON: {error}."
            ) from error
        if tools and not isinstance(tools, list):
            raise InvalidConversation(
                "tools", f"{where}: '{self._path('tools')}' must be a list, got {kind_of(tools)}."
            )
        return tools or None

    def _path(self, key: str) -> str:
        return self._paths.get(key) or _OPTIONAL[key]

    def _value(self, record: Mapping[str, Any], key: str, where: str) -> Any:
        if key == "input" and key not in self._paths:
            return None  # a common name, which means this in Alpaca's format only
        path = self._path(key)
        value = find(record, path)
        if value is not _ABSENT:
            return value
        if key in _OPTIONAL and key not in self.fields:
            return None
        raise InvalidConversation(
            "missing field",
            f"{where}: there is no field '{path}' (read as {self.detected}); the fields are {_names(record)}. Mend the "
            f"record, or name another field: the source's fields: {{{key}: …}}.",
        )


def find(record: Any, path: str) -> Any:
    """What lies at a path such as `instances.0.output`; a mark of its own where nothing does."""
    if isinstance(record, Mapping) and path in record:
        return record[path]
    head, _, rest = path.partition(".")
    if isinstance(record, Mapping) and rest and head in record:
        return find(record[head], rest)
    if isinstance(record, list) and head.isdecimal() and int(head) < len(record):
        return find(record[int(head)], rest) if rest else record[int(head)]
    return _ABSENT


def _listed(record: Mapping[str, Any], paths: Mapping[str, str]) -> str:
    """Whether turns are written as ShareGPT has them."""
    turns = find(record, paths["messages"])
    first = turns[0] if isinstance(turns, list) and turns else {}
    return "sharegpt" if isinstance(first, Mapping) and "from" in first and "role" not in first else "messages"


def _completion(messages: Sequence[Mapping[str, Any]]) -> int:
    """The first message behind the last one of the user's."""
    return max((n + 1 for n, message in enumerate(messages) if message["role"] == "user"), default=0)


def _content(value: Any, key: str, turn: Mapping[str, Any], place: str) -> str:
    if isinstance(value, list) and all(isinstance(p, Mapping) and isinstance(p.get("text"), str) for p in value):
        return "".join(part["text"] for part in value)
    if isinstance(value, str):
        return value
    if value is _ABSENT:
        raise InvalidConversation("missing field", f"{place}: there is no field '{key}'; there are {', '.join(turn)}.")
    raise InvalidConversation(
        "no text", f"{place}: '{key}' must be a text, got {kind_of(value)}. Only text can be read."
    )


def _weight(turn: Mapping[str, Any], place: str) -> int:
    weight = turn.get("weight")
    if weight is None:
        return 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise InvalidConversation(
            "weight", f"{place}: the weight is {weight!r}; a message is learned (1) or not (0). Write one of these."
        )
    return int(weight)


def _written(conversation: Conversation, where: str) -> str:
    """A conversation as JSON. Formats that are not JSON hold values that it has no form for, such as dates."""
    try:
        return conversation.to_json()
    except (TypeError, RecursionError) as error:
        raise InvalidConversation(
            "no JSON", f"{where}: messages or tools hold what JSON cannot: {error}. Write it as text."
        ) from error


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
        if message["role"] != "assistant" or not weight or message.get("tool_calls"):
            continue
        if not message["content"].strip():
            raise InvalidConversation(
                "empty answer",
                f"{where}, turn {number}: the answer is empty, and a model would learn to say nothing. Remove the "
                "record, or give this turn `weight: 0`.",
            )


def _names(record: Any) -> str:
    return ", ".join(list(_paths(record, ""))[:20]) or "none"


def _paths(value: Any, prefix: str) -> Iterator[str]:
    """The paths of what a record holds; of a list the first item's."""
    if isinstance(value, Mapping) and prefix.count(".") < 4:
        for key, inner in value.items():
            yield from _paths(inner, f"{prefix}{key}.")
    elif isinstance(value, list) and value and prefix.count(".") < 4:
        yield from _paths(value[0], f"{prefix}0.")
    else:
        yield prefix[:-1]


def kind_of(value: Any) -> str:
    """What a value of a record is, in JSON's words."""
    if value is None:
        return "nothing (null)"
    names = {list: "list", dict: "object", str: "text", int: "number", float: "number"}
    name = names.get(type(value), type(value).__name__)
    if name in ("list", "object", "text") and not value:
        return f"an empty {name}"
    return f"an {name}" if name == "object" else f"a {name}"

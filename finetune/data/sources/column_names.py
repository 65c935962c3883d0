"""Meanings of columns, proposed from their names: in errors and for new recipes. A run guesses none."""

from collections.abc import Iterable, Mapping

from finetune.utils.quoting import shell_command

_MESSAGES = ("messages", "conversations", "conversation", "dialogue", "chat")
_USER = ("question", "instruction", "prompt", "query", "user", "request", "input")
_INPUT = ("input", "context")
_ASSISTANT = ("answer", "completion", "response", "output", "reply", "assistant", "target")
_CHOSEN = ("chosen", "chosen_response", "response_chosen", "preferred", "accepted", "better", "winner")
_REJECTED = ("rejected", "rejected_response", "response_rejected", "dispreferred", "worse", "loser")
# Prompts that are found by these names.
_OWN_PROMPTS = ("prompt", "instruction", "question", *_MESSAGES[:3])
_SYSTEM = ("system", "system_prompt")
_TEXT = ("text", "content", "body", "document", "article", "sentence", "review", "comment", "message", "tweet")
_WORDS = ("tokens", "words")
_TAGS = ("ner_tags", "tags", "pos_tags", "labels", "chunk_tags", "upos")
PREFERENCES = (
    "These are preferences (`chosen` beside `rejected`), which `finetune dpo` learns, or a recipe with `task: dpo`. To "
    "learn the chosen answers alone, name them in the source's `fields`: {user: prompt, assistant: chosen}, or "
    "{messages: chosen} where they are lists of turns."
)
SPANS = (
    "Spans of characters, as doccano and Label Studio write them, are not read: each word needs a tag of its own. "
    "Export them as CoNLL, which both can, or write lists of words and tags."
)
_LABEL = ("label", "labels", "class", "category", "sentiment", "intent", "target")


def guess_chat_fields(names: Iterable[str]) -> dict[str, str]:
    """Returns columns of conversations by their meaning, as a source's `fields` has them; empty if these are none."""
    known = {name.strip().lower(): name for name in names}
    if (turns := _first(known, _MESSAGES)) is not None:
        return {"messages": turns}
    columns = {"user": _first(known, _USER), "assistant": _first(known, _ASSISTANT)}
    if None in columns.values():
        return {}
    taken = {name: column for name, column in known.items() if column not in columns.values()}
    columns |= {"input": _first(taken, _INPUT), "system": _first(taken, _SYSTEM)}
    return {key: name for key, name in columns.items() if name is not None}


def guess_pair_fields(names: Iterable[str]) -> dict[str, str] | None:
    """Returns columns of pairs of answers, but those that are found by their names; None if these are none."""
    known = {name.strip().lower(): name for name in names}
    columns = {"chosen": _first(known, _CHOSEN), "rejected": _first(known, _REJECTED)}
    if None in columns.values():
        return None
    if not {*_OWN_PROMPTS} & {*known.values()}:
        columns["prompt"] = _first(known, _OWN_PROMPTS) or _first(known, _USER)
    return {key: name for key, name in columns.items() if name not in (None, key)}


def guess_field(names: Iterable[str], key: str, *, words: bool = False) -> str | None:
    """Returns the column that a source's `text_field` or `label_field` may be; of words and their tags with `words`."""
    wanted = {"text_field": _WORDS if words else _TEXT, "label_field": _TAGS if words else _LABEL}
    return _first({name.strip().lower(): name for name in names}, wanted.get(key, ()))


def unread_kind(names: Iterable[str]) -> str:
    """Returns what records with such fields are if no task reads them, and what to do; an empty text for others."""
    known = {name.strip().lower() for name in names}
    if {"chosen", "rejected"} <= known:
        return PREFERENCES
    return SPANS if known & {"entities", "spans", "annotations"} else ""


def as_overrides(source: str, keys: Mapping[str, str]) -> str:
    """Returns overrides for the command line.

    Args:
        source: Key of the source, such as `data.train.0`; empty where it is not known.
        keys: Values by their keys below it.
    """
    prefix = f"{source}." if source else ""
    return shell_command(f"{prefix}{key}={value}" for key, value in keys.items())


def _first(known: Mapping[str, str], wanted: Iterable[str]) -> str | None:
    return next((known[name] for name in wanted if name in known), None)

"""Conversations to tokens, and to a mask that says which of them are learned.

Letters: `N` tokens of one conversation.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from finetune.config.recipe_schema import ChatSection
from finetune.data.chat import special_token_text
from finetune.data.chat.chat_templates import Part, Template, find_answers, first_messages, write_conversation
from finetune.data.chat.special_token_text import Span
from finetune.data.sources.conversation_formats import REASONING, Conversation, InvalidConversation, Tolerance
from finetune.data.sources.corpus import Chosen
from finetune.data.tokenization.encoded import Encoded, Example, Facts, Mask
from finetune.data.tokenization.tokenizer import open_tokenizer
from finetune.utils.errors import DataError

FORMAT_VERSION = 3
"""Version of the encoding of conversations; part of the cache's key."""
_SHAPING = ("train_on", "end_token", "too_long", "drop_tools", "drop_reasoning")


class ChatEncoder:
    """Turns conversations into examples."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: Template,
        section: ChatSection,
        *,
        row_length: int,
        around: tuple[int | None, int | None] = (None, None),
        tolerance: Tolerance | None = None,
    ) -> None:
        """Takes what the recipe says.

        Args:
            row_length: T; a conversation has at most one token more.
            around: Tokens before and behind documents that are plain text.
            tolerance: The way to treat conversations that the template refuses; left out, none is left out.

        Raises:
            DataError: If the tokenizer has no fast backend.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise DataError(
                f"The tokenizer {type(tokenizer).__name__} is a slow one, which cannot say where in a text its tokens "
                "lie, and so not which of them are answers. Name a tokenizer with a tokenizer.json as tokenizer.name."
            )
        self._tokenizer, self._template, self._section = tokenizer, template, section
        self._row_length, self._around, self._tolerance = row_length, around, tolerance or Tolerance()
        definition = backend.to_str()
        self._literal = open_tokenizer(definition)
        self._fast = open_tokenizer(definition)
        self._fast.encode_special_tokens = False
        added = tokenizer.added_tokens_decoder.items()
        self._special = {int(number): token.content for number, token in added if token.special}
        if tokenizer.eos_token_id is not None:
            self._special[int(tokenizer.eos_token_id)] = str(tokenizer.eos_token)
        self._names = tuple(sorted(self._special.values()))

    def key(self, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
        """Everything that shapes examples; takes the tokenizer's identity."""
        section = self._section
        key = {
            "version": FORMAT_VERSION,
            "tokenizer": tokenizer,
            "special": self._names,
            "template": [self._template.text, self._template.tool_use],
            "variables": dict(self._template.variables),
            "rules": [getattr(section, name) for name in _SHAPING] + [self._row_length, *self._around],
        }
        # A template writes what goes around a conversation.
        return {"bos": None, "eos": None, "chat": key}

    def encode_all(self, batches: Iterable[Sequence[Chosen]]) -> Iterator[tuple[Sequence[Chosen], Encoded]]:
        """Encodes batches lazily, in order.

        Raises:
            DataError: If answers cannot be told from the rest, or the template refuses a conversation.
        """
        for batch in batches:
            examples = [self.encode(item.text, item.document.where) for item in batch]
            ids, masks, facts, weights = zip(*examples, strict=True)
            lengths = np.array([one.size for one in ids], np.uint32)
            columns: dict[str, npt.NDArray[Any]] = {"mask": np.concatenate(masks)}
            if any(one is not None for one in weights):
                each = (np.ones(n, np.float32) if w is None else w for n, w in zip(lengths, weights, strict=True))
                columns["weights"] = np.concatenate([*each])
            yield batch, Encoded(lengths, np.concatenate(ids), columns, facts=facts)

    def encode(self, document: bytes, where: str) -> Example:
        """One conversation, or one document of plain text."""
        parsed = Conversation.from_json(document)
        if isinstance(parsed, str):
            return self._plain(parsed)
        try:
            return self._fitting(parsed, where)
        except RecursionError:
            problem = InvalidConversation("nested too deeply", f"{where}: its tools or calls are nested too deeply.")
        except InvalidConversation as broken:
            problem = broken
        self._tolerance.meet(problem)
        return left_out(Facts(refused=1))

    def _plain(self, text: str) -> Example:
        before, behind = ([] if token is None else [token] for token in self._around)
        ids = self._literal.encode(text, add_special_tokens=False).ids
        if not ids:
            return left_out(Facts(unsupervised=1))
        array = np.array([*before, *ids, *behind], np.uint32)
        mask = np.full(array.size, True)
        facts = Facts(examples=1, tokens=array.size, supervised=array.size - 1)
        return Example(array, mask, _ended(facts, *behind))

    def _fitting(self, conversation: Conversation, where: str) -> Example:
        """An example that fits into a row, or none."""
        example = self._example(conversation, where)
        room = self._row_length + 1
        if example.ids.size <= room:
            return example
        if self._section.too_long == "cut_right":
            return cut_right(example, room, self._special.keys())
        for shorter in _without_oldest(conversation) if self._section.too_long == "cut_left" else ():
            example = self._example(shorter, where)
            if 0 < example.ids.size <= room:
                return example._replace(facts=replace(example.facts, cut=1))
        return left_out(Facts(too_long=1))

    def _example(self, conversation: Conversation, where: str) -> Example:
        learned = self._learned(conversation, where)
        text, literals, answered, unwritten = self._write(conversation, learned, where)
        ids, offsets = special_token_text.encode(self._fast, self._literal, text, literals)
        tokens = np.array(ids, np.uint32)
        for start, end in literals:
            made = set(tokens[(offsets[:, 0] >= start) & (offsets[:, 1] <= end)].tolist()) & self._special.keys()
            if any(self._special[number] in text[start:end] for number in made):
                raise InvalidConversation(
                    "special tokens",
                    f"{where}: the text {text[start:end]!r} becomes a special token whatever is done, because the "
                    "tokenizer's vocabulary holds it as a word. Remove it from the record.",
                )
        weights = np.full(tokens.size, self._plain_weight(conversation), np.float32)
        shared = 0
        for number, spans in answered.items():
            for start, end in spans:
                inside = (offsets[:, 0] < end) & (offsets[:, 1] > start)
                weights[inside] = conversation.weights[number] if number in learned else 0
                shared += int(inside.any() and offsets[inside.argmax(), 0] < start)
        if self._section.end_token == "add":
            tokens, weights, offsets = self._add_ends(tokens, weights, offsets, [answered[n] for n in learned])
        mask = weights > 0
        supervised = int(mask[1:].sum())  # the first token is never a target
        if not supervised:
            return left_out(Facts(unsupervised=1))
        closing = None
        for index in np.flatnonzero(mask)[::-1][:4].tolist():
            if int(tokens[index]) in self._special:
                closing = int(tokens[index])
                break
            if not text[offsets[index, 0] : offsets[index, 1]].isspace():
                break
        facts = Facts(
            examples=1,
            tokens=tokens.size,
            supervised=supervised,
            answers=len(learned),
            shared=shared,
            tools_dropped=int("tools" in unwritten),
            unwritten=dict.fromkeys(sorted(unwritten - {"tools"}), 1),
        )
        return Example(tokens, mask, _ended(facts, closing), weights if (weights[mask] != 1).any() else None)

    def _plain_weight(self, conversation: Conversation) -> float:
        """The factor of the losses of all tokens that are no answer's: of the record, if they are learned."""
        others = (
            weight
            for message, weight in zip(conversation.messages, conversation.weights, strict=True)
            if message["role"] != "assistant"
        )
        return max(others, default=1) if self._section.train_on == "all" else 0

    def _learned(self, conversation: Conversation, where: str) -> list[int]:
        """The numbers of the messages that are learned; with `all` of those that are answers."""
        roles, weights = [message["role"] for message in conversation.messages], conversation.weights
        silent = [n for n, role in enumerate(roles) if role != "assistant" and not weights[n]]
        if self._section.train_on == "all" and silent and any(weights):
            raise InvalidConversation(
                "weight",
                f"{where}, turn {silent[0] + 1}: this turn of role {roles[silent[0]]} is not to be learned, and with "
                "chat.train_on: all only answers can be left out. Remove its weight, or set train_on to assistant.",
            )
        spoken = [number for number, role in enumerate(roles) if role == "assistant"]
        if self._section.train_on == "last":
            spoken = spoken[-1:]
        elif self._section.train_on == "completions":
            spoken = [number for number in spoken if number >= conversation.completion]
        return [number for number in spoken if weights[number]]

    def _write(
        self, conversation: Conversation, learned: list[int], where: str
    ) -> tuple[str, list[Span], dict[int, list[Span]], frozenset[str]]:
        """A conversation as the template writes it.

        Returns:
            The text; where in it special tokens are only characters; where answers lie, by message; and the fields of
            which the template does not write all.
        """
        writing = write_conversation(self._template, conversation, where)
        chat, wanted = writing.chat, learned
        unwritten = self._check_unwritten(chat, writing.missing, learned, where)
        if self._section.train_on == "all":
            # Only what is not learned as the rest is has to be found, and what needs an end.
            plain = self._plain_weight(chat)
            silent = [
                n
                for n, message in enumerate(chat.messages)
                if message["role"] == "assistant" and (n not in learned or chat.weights[n] != plain)
            ]
            wanted = sorted({*silent, *(learned if self._section.end_token == "add" else [])})
        raw = json.dumps([chat.messages, chat.tools], ensure_ascii=False)
        marks = special_token_text.marks_for(raw)
        special = special_token_text.alternatives(self._names)
        chat = replace(chat, messages=marks.put(chat.messages, special), tools=marks.put(chat.tools, special))
        written = special_token_text.alternatives(self._names, marks)
        text, spans = find_answers(self._template, chat, wanted, written, where)
        clean, parts, places = marks.remove(text)
        if clean != writing.text:
            raise InvalidConversation(
                "special tokens",
                f"{where}: a message holds a special token ({', '.join(sorted(set(special.findall(raw))))}), which the "
                "chat template reads as more than characters. Remove it from the record.",
            )

        def moved(place: int) -> int:
            return place - bisect_left(places, place)

        answers = {n: [(moved(start), moved(end)) for start, end in answer] for n, answer in spans.items()}
        return clean, parts, answers, unwritten

    def _check_unwritten(
        self, chat: Conversation, missing: Sequence[Part], learned: Sequence[int], where: str
    ) -> frozenset[str]:
        """The fields of which the template does not write all; those that are needed are refused."""

        def written_as_last(field: str, turn: int) -> bool:
            # Many templates write no thoughts of earlier turns, but all those of the last one.
            last = write_conversation(self._template, first_messages(chat, turn + 1), where)
            return all((part.field, part.turn) != (field, turn) for part in last.missing)

        for part in missing:
            field, turn = part.field, -1 if part.turn is None else part.turn
            if field == "tools" and not self._section.drop_tools:
                kind, has = field, "the conversation has tools"
                effect = "learn calls of functions that it never saw"
                otherwise = "set chat.drop_tools to true to learn without them"
            elif field in ("content", "tool_calls"):
                kind, has = field, f"this turn has `{field}`"
                effect, otherwise = "learn or read something else than the record says", "mend the record"
            elif (
                field in REASONING
                and turn in learned
                and not (self._section.drop_reasoning or written_as_last(field, turn))
            ):
                kind, has = "reasoning", f"the answer has `{field}`"
                effect, otherwise = "learn to answer without", "set chat.drop_reasoning to true to learn without it"
            else:
                continue
            raise InvalidConversation(
                f"{kind} that the template does not write",
                f"{where}{f', turn {turn + 1}' if turn >= 0 else ''}: {has}, and the chat template "
                f"({self._template.name}) does not write all of it, so that a model would {effect}. Name a template "
                f"that does as chat.template (`plain` writes content, tools and calls), or {otherwise}.",
            )
        text = self._template.text_for(chat, where)
        unread = (name for name in chat.variables if re.search(rf"\b{re.escape(name)}\b", text) is None)
        return frozenset([*(part.field for part in missing), *(f"chat_template_kwargs.{name}" for name in unread)])

    def _add_ends(
        self,
        tokens: npt.NDArray[np.uint32],
        weights: npt.NDArray[np.float32],
        offsets: npt.NDArray[np.int64],
        learned: Sequence[list[Span]],
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """Lets each learned answer end in a special token: the one behind it, or else the tokenizer's."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise DataError(
                "chat.end_token is `add`, but the tokenizer has no end-of-text token. Set chat.end_token to `template`."
            )
        places = []
        for spans in learned:
            start, end = spans[-1] if spans else (0, 0)
            inside = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            if not inside.size or int(tokens[inside[-1]]) in self._special:
                continue
            behind = int(inside[-1]) + 1
            if behind < tokens.size and int(tokens[behind]) in self._special:
                weights[behind] = weights[behind - 1]
            else:
                places.append(behind)
        at = np.array(places, np.int64)
        ends = offsets[at - 1, 1]
        offsets = np.insert(offsets, at, np.stack([ends, ends], axis=1), axis=0)
        return np.insert(tokens, at, eos), np.insert(weights, at, weights[at - 1]), offsets


def _without_oldest(conversation: Conversation) -> Iterator[Conversation]:
    """A conversation without its oldest exchange, then without one more, and so on; its system message stays."""
    roles = [message["role"] for message in conversation.messages]
    first = int(roles[0] == "system")
    for start in (number for number, role in enumerate(roles) if role == "user" and number > first):
        yield replace(
            conversation,
            messages=conversation.messages[:first] + conversation.messages[start:],
            weights=conversation.weights[:first] + conversation.weights[start:],
            completion=max(first, conversation.completion - (start - first)),
        )


def _ended(facts: Facts, end: int | None = None) -> Facts:
    """The counts of an example by the special token that ends its last answer, if one does."""
    return replace(facts, ended=int(end is not None), ends={} if end is None else {str(end): 1})


def left_out(facts: Facts) -> Example:
    """No tokens, but counts."""
    return Example(np.array([], np.uint32), np.array([], np.bool_), facts)


def cut_right(example: Example, room: int, special: Collection[int]) -> Example:
    """An example without its end; left out if that leaves nothing to learn.

    Args:
        example: One of more than `room` tokens.
        room: Tokens that stay.
        special: Tokens that end answers.
    """
    ids, mask = example.ids[:room], example.mask[:room]
    if not mask[1:].any():
        return left_out(Facts(too_long=1))
    gone = _runs(example.mask) - _runs(mask)
    lost = gone + int(mask[-1] and example.mask[room])
    facts = replace(
        example.facts,
        tokens=room,
        supervised=int(mask[1:].sum()),
        answers=example.facts.answers - gone,
        cut=1,
        answers_cut=lost,
    )
    last = int(ids[mask][-1])
    weights = None if example.weights is None else example.weights[:room]
    return Example(ids, mask, _ended(facts, last if last in special else None) if lost else facts, weights)


def _runs(mask: Mask) -> int:
    """Number of runs of targets."""
    return int((np.diff(mask, prepend=False) & mask).sum())

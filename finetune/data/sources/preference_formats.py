"""Records of preferences to one format: a prompt with two answers, or with one and its label, as JSON.

Records are pairs (`chosen`, `rejected`), rankings (`completions` with `scores` or `ranks`), or single answers with a
`label` (LLaMA-Factory: `kto_tag`). The prompt is `prompt`, a conversation's turns, Alpaca's fields, or what both
answers begin with. An answer with its prompt is a conversation to `conversation_formats`: roles, tools, template
variables and weights are read as they are for fine-tuning.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from finetune.data.sources.conversation_formats import (
    ABSENT,
    Conversation,
    InvalidConversation,
    RecordForm,
    Tolerance,
    find_value,
    kind_of,
    without_nulls,
)
from finetune.utils.errors import DataError

FORMAT_VERSION = 2
"""Version of the reading and splitting of records; part of the cache's key."""
_EMPTY = "the answer is empty. Mend the record, or remove it."
_DIFFER = "the answers are to different prompts, or to none. A pair is two answers to one prompt: mend the record."
_LAST = "an answer ends with a turn of the assistant, and at least one of its turns is learned. Mend the record."
_WEIGHED = "an answer counts 1, or turns of it 0. Remove other weights; `preference` has those of losses."

Answer = str | list[dict[str, Any]]

LABELS = ("label", "kto_tag")
"""Fields that tell if an answer is desirable."""
_SCORES = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen_rating", "rejected_rating"))
# What is read here; the rest of a record is read as that of a conversation.
_OWN = ("chosen", "rejected", "completion", "completions", "margin", "scores", "ranks", *LABELS, *sum(_SCORES, ()))
_TURNS = ("messages", "conversations", "conversation", "prompt")
# A prompt that is one text, and what an answer beside it is called.
_ANSWERS = {"prompt": "completion", "instruction": "output", "question": "answer"}
_TRUTH = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


@dataclass(frozen=True)
class Preference:
    """A prompt and either two answers or one with a label. All are texts, or all are lists of messages."""

    prompt: Answer
    chosen: Answer | None = None
    rejected: Answer | None = None
    completion: Answer | None = None
    label: bool | None = None
    """True if `completion` is desirable."""
    margin: float | None = None
    """By how much a reward model's scores are to differ."""
    score: list[float] | None = None
    """Scores of the chosen and of the rejected answer; a higher one is better."""
    weights: dict[str, list[float]] | None = None
    """Weights of an answer's messages, 0 or 1, by its name; None if all are 1."""
    tools: list[Any] | None = None
    variables: dict[str, Any] | None = None
    """Variables for the chat template."""

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        tree = {key: value for key, value in vars(self).items() if value is not None}
        return json.dumps(tree, ensure_ascii=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> "Preference":
        """Reads what `to_json` wrote."""
        return Preference(**json.loads(text))

    def apart(self) -> "tuple[Preference, ...]":
        """Returns both answers as records of their own, the chosen one as desirable; of one answer, itself."""
        if self.completion is not None:
            return (self,)
        alone, weights = replace(self, chosen=None, rejected=None, margin=None, score=None), self.weights or {}
        return tuple(
            replace(alone, completion=getattr(self, name), label=name == "chosen", weights=given)
            for name in ("chosen", "rejected")
            for given in ({"completion": weights[name]} if name in weights else None,)
        )

    def half(self, name: Literal["chosen", "rejected", "completion"]) -> Conversation | tuple[str, str]:
        """Returns the prompt with an answer: a conversation of which the answer alone is learned, or two texts."""
        answer: Any = getattr(self, name)
        if isinstance(self.prompt, str):
            return self.prompt, answer
        weights = [0] * len(self.prompt) + (self.weights or {}).get(name, [1] * len(answer))
        return Conversation([*self.prompt, *answer], weights, self.tools, len(self.prompt), self.variables or {})


@dataclass
class PreferenceForm:
    """The way to read the records of one source."""

    form: RecordForm
    """Reads each answer with its prompt, in format `auto`, with the source's names of roles, and tolerates nothing."""
    tolerance: Tolerance
    chat: bool
    """True if texts are turns of a conversation; False if an answer follows its prompt as text."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """Paths of fields that are not where they are looked for, such as {prompt: question, chosen: answers.0}."""
    ranking: Literal["extremes", "all"] = "extremes"
    """Pairs of a ranking: the best answer against the worst, or each against all that are worse."""
    single: bool | None = None
    """True if answers are learned one by one, also those of pairs; False if they are learned in pairs; None: either."""

    format = detected = "preferences"

    @property
    def unread(self) -> set[str]:
        """Fields of records that hold something and are not read."""
        return self.form.unread

    def fingerprint(self) -> list[Any]:
        """Lists all that decides how a record is read."""
        return [FORMAT_VERSION, self.form.fingerprint(), self.chat, dict(self.fields), self.ranking, self.single]

    def read(self, record: Any, where: str) -> str:
        """Returns the preferences of a record, a line of JSON each: several of a ranking, none if it is broken and left
        out.

        Raises:
            DataError: If it is in no known format, or broken.
        """
        if not isinstance(record, Mapping):
            raise DataError(f"{where}: a preference is an object with fields, got {kind_of(record)}.")
        try:
            record = without_nulls(record, where)
            moved = {key: find_value(record, path) for key, path in self.fields.items()}
            for key, value in moved.items():
                said = f"there is no field '{self.fields[key]}' (a null is none); the fields are {', '.join(record)}"
                _refuse(
                    value is ABSENT, "missing field", f"{where}: {said}. Mend the record, or the source's `fields`."
                )
            heads = {path.partition(".")[0] for path in self.fields.values()}
            record = {**{key: value for key, value in record.items() if key not in heads}, **moved}
            read = self._preferences(record, where)
            return "\n".join(one.to_json() for pair in read for one in (pair.apart() if self.single else (pair,)))
        except InvalidConversation as problem:
            self.tolerance.meet(problem)
            return ""

    def _preferences(self, record: Mapping[str, Any], where: str) -> Iterator[Preference]:
        label = next((name for name in LABELS if name in record), None)
        if {"chosen", "rejected"} <= record.keys():
            names = next((names for names in _SCORES if record.keys() & {*names}), ())
            score = [_number(record.get(name), f"{where}: '{name}'") for name in names]
            said = " and ".join(f"{name} is {value:g}" for name, value in zip(names, score, strict=True))
            said += ": the chosen answer is the worse one. Exchange the answers, or remove the scores."
            _refuse(bool(score) and score[0] < score[1], "scores", f"{where}: {said}")
            margin = _number(record["margin"], f"{where}: 'margin'") if "margin" in record else None
            answers = {name: record[name] for name in ("chosen", "rejected")}
            yield self._preference(record, answers, where, score=score or None, margin=margin)
        elif "completions" in record:
            for (high, better), (low, worse) in self._ranked(record, where):
                yield self._preference(record, {"chosen": better, "rejected": worse}, where, score=[high, low])
        elif label is not None:
            said = "this is one answer with a label, and pairs are learned. Give `chosen` and `rejected`"
            _refuse(self.single is False, "label", f"{where}: {said}, or set task.name to `kto`.")
            truth = _TRUTH.get(str(record[label]).strip().lower())
            said = f"'{label}' is {str(record[label])[:40]!r}; it is true for a desirable answer and false for others"
            _refuse(truth is None, "label", f"{where}: {said}. Mend the record.")
            yield self._preference(record, {"completion": record.get("completion", ABSENT)}, where, label=truth)
        else:
            said = (
                "A preference has `chosen` and `rejected`, `completions` and `scores` or `ranks`, or a `label`. Name "
            )
            said += "them in the source's `fields`, such as {prompt: question, chosen: better, rejected: worse}."
            _refuse(True, "missing field", f"{where}: the fields are {', '.join(record) or 'none'}. {said}")

    def _ranked(self, record: Mapping[str, Any], where: str) -> list[tuple[tuple[float, Any], tuple[float, Any]]]:
        """Returns pairs of answers with their scores, the better one first."""
        key, answers = "scores" if "scores" in record else "ranks", record["completions"]
        numbers: Any = record.get(key)
        if not isinstance(answers, list) or not isinstance(numbers, list) or len(answers) != len(numbers):
            got = " and ".join(f"{len(v)} items" if isinstance(v, list) else kind_of(v) for v in (answers, numbers))
            _refuse(True, "scores", f"{where}: 'completions' and '{key}' must be lists of the same length, got {got}.")
        sign = 1 if key == "scores" else -1  # the first rank is the best
        scores = [sign * _number(number, f"{where}: '{key}', answer {n}") for n, number in enumerate(numbers, start=1)]
        order = sorted(zip(scores, answers, strict=True), key=lambda answer: -answer[0])
        pairs = itertools.combinations(order, 2) if self.ranking == "all" else [(order[0], order[-1])] if order else []
        ranked = [(better, worse) for better, worse in pairs if better[0] > worse[0]]
        _refuse(not ranked, "tie", f"{where}: no answer has better '{key}' than another. Remove the record.")
        return ranked

    def _preference(self, record: Mapping[str, Any], answers: Mapping[str, Any], where: str, **more: Any) -> Preference:
        places = {name: f"{where}, {name}" for name in answers}
        halves: dict[str, Any]
        equal = len(answers) == 2 and answers["chosen"] == answers["rejected"]
        _refuse(equal, "equal halves", f"{where}: both answers are the same. Remove the record.")
        if not self.chat:
            self.form.unread |= record.keys() - {"prompt", *_OWN}
            texts = {name: _text(answer, places[name]) for name, answer in answers.items()}
            given = len(answers) == 1 or "prompt" in record
            prompt = _text(record.get("prompt", ABSENT), f"{where}, prompt") if given else _beginning(*texts.values())
            halves = {name: text if given else text[len(prompt) :] for name, text in texts.items()}
            for name, half in halves.items():
                _refuse(not half.strip(), "empty half", f"{places[name]}: {_EMPTY}")
            _refuse(not given and not prompt, "prompts differ", f"{where}: {_DIFFER}")
            return Preference(prompt, **halves, **more)
        both = {name: self._converse(record, answer, places[name]) for name, answer in answers.items()}
        (one, size), *others = both.values()
        turns = zip(*(conversation.messages for conversation, _ in both.values()), strict=False)
        shared = len([*itertools.takewhile(lambda turn: turn[0] == turn[-1], turns)])
        size = size if size is not None else shared if others else one.completion
        halves = {name: conversation.messages[size:] for name, (conversation, _) in both.items()}
        weights = {name: conversation.weights[size:] for name, (conversation, _) in both.items()}
        asked_first = any(half and half[0]["role"] == "user" for half in halves.values())
        _refuse(not 0 < size <= shared or asked_first, "prompts differ", f"{where}, turn {shared + 1}: {_DIFFER}")
        for name, half in halves.items():
            last: dict[str, Any] = half[-1] if half else {}
            _refuse(
                not last.get("tool_calls", last.get("content", "").strip()), "empty half", f"{places[name]}: {_EMPTY}"
            )
            _refuse(last["role"] != "assistant" or not any(weights[name]), "last turn", f"{places[name]}: {_LAST}")
            _refuse(not {*weights[name]} <= {0, 1}, "weight", f"{places[name]}: {_WEIGHED}")
        more["weights"] = {name: given for name, given in weights.items() if not all(given)} or None
        return Preference(one.messages[:size], **halves, tools=one.tools, variables=one.variables or None, **more)

    def _converse(self, record: Mapping[str, Any], answer: Any, where: str) -> tuple[Conversation, int | None]:
        """Returns a prompt and an answer as a conversation, and the number of messages of a prompt that is given."""
        rest: dict[str, Any] = {key: value for key, value in record.items() if key not in _OWN}
        prompt = next((rest[name] for name in _TURNS if name in rest), ABSENT)
        turns = [answer] if isinstance(answer, Mapping) else answer
        behind: int | None = None  # messages of the answer, if the prompt is given
        if isinstance(turns, str) and not isinstance(prompt, list):
            name = next((name for name in _ANSWERS if name in rest), None)
            if name is None:
                said = "Name it in the source's `fields`; texts that contain it are read without `chat` in the recipe."
                raise InvalidConversation("missing field", f"{where}: of {', '.join(record)}, none is a prompt. {said}")
            rest[_ANSWERS[name]], behind = turns, 1
        elif isinstance(turns, str | list):
            rest = {key: value for key, value in rest.items() if key not in _TURNS}
            rest["messages"] = prompt if isinstance(turns, str) else turns
            if isinstance(turns, list) and isinstance(prompt, list) and turns[: len(prompt)] != prompt:
                rest["messages"], behind = [*prompt, *turns], len(turns)
        elif turns is not ABSENT:
            _refuse(True, "no turns", f"{where}: an answer is a text or turns, got {kind_of(turns)}.")
        conversation = Conversation.from_json(self.form.read(rest, where))
        if not isinstance(conversation, Conversation):
            raise InvalidConversation(
                "missing field", f"{where}: there is no answer; the fields are {', '.join(record)}."
            )
        messages, weights = conversation.messages, conversation.weights
        asked = [message.get("content") for message in messages if message["role"] == "user"]
        if isinstance(turns, list) and isinstance(prompt, str):
            _refuse(bool(asked) and prompt not in asked, "prompts differ", f"{where}, prompt: {_DIFFER}")
            if not asked:
                at, behind = int(messages[0]["role"] == "system"), len(turns)
                messages = [*messages[:at], {"role": "user", "content": prompt}, *messages[at:]]
                weights = [1, *weights]
        elif isinstance(turns, str) and isinstance(prompt, list):
            messages, weights, behind = [*messages, {"role": "assistant", "content": turns}], [*weights, 1], 1
        return replace(conversation, messages=messages, weights=weights), None if behind is None else len(
            messages
        ) - behind


def has_prompt(record: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    """Tells if a record names its prompt, so that its answers do not hold it."""
    return "prompt" in fields or bool({*_TURNS, *_ANSWERS} & record.keys())


def _number(value: Any, place: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    _refuse(not math.isfinite(number), "scores", f"{place} must be a finite number, got {str(value)[:40]}.")
    return number


def _text(value: Any, place: str) -> str:
    got = "no such field" if value is ABSENT else kind_of(value)
    turns = "Turns are read with a `chat` section in the recipe."
    _refuse(not isinstance(value, str), "no text", f"{place}: it must be a text, got {got}. {turns}")
    return str(value)


def _beginning(chosen: str, rejected: str) -> str:
    """Returns what both texts begin with, but for a space at its end, which is the answers'. This is TRL's rule."""
    same = itertools.takewhile(lambda letters: letters[0] == letters[1], zip(chosen, rejected, strict=False))
    return "".join(letter for letter, _ in same).removesuffix(" ")


def _refuse(broken: bool, kind: str, text: str) -> None:
    if broken:
        raise InvalidConversation(kind, text)

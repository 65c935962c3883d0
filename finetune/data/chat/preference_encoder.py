"""Preferences to tokens: each answer with its prompt, one after the other, and a mask that says which are learned."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from finetune.data.chat import special_token_text
from finetune.data.chat.chat_encoder import ChatEncoder, left_out
from finetune.data.sources.conversation_formats import Conversation, InvalidConversation, Tolerance
from finetune.data.sources.corpus import Chosen
from finetune.data.sources.preference_formats import Preference
from finetune.data.tokenization.encoded import Encoded, Example, Facts
from finetune.data.tokenization.tokenizer import Encoder

_VERSION = 2
# Counts of a pair's answers; of others a pair has one.
_OF_BOTH = ("tokens", "supervised", "answers", "answers_cut", "shared")
_ENDS_ALONE = "the answer is nothing but special tokens. Mend the record, or remove it."
_BECOME_EQUAL = (
    "both answers become the same tokens: the chat template or the tokenizer drops what tells them apart. Name another "
    "one (chat.template, tokenizer.name), or remove the record."
)


class PreferenceEncoder:
    """Turns answers into tokens; a pair of which a half is left out is left out whole."""

    def __init__(
        self,
        encoder: Encoder | ChatEncoder,
        tokenizer: PreTrainedTokenizerBase,
        row_length: int,
        *,
        margins: bool = False,
        tolerance: Tolerance | None = None,
    ) -> None:
        """Takes what encodes texts, or conversations, and one less than the most tokens of an answer with its prompt.

        Args:
            margins: Whether there is a column of the records' `margin`, 0 where they have none.
            tolerance: The way to treat answers that are lost in their tokens; left out, none is left out.
        """
        self._encoder, self._row_length, self._margins = encoder, row_length, margins
        self._tolerance, self._special_ids = tolerance or Tolerance(), [*tokenizer.all_special_ids]
        self._special = special_token_text.alternatives(tuple(sorted(tokenizer.all_special_tokens)))

    def key(self, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
        """Everything beside the tokenizer, of which it takes the identity, that shapes tokens."""
        return {**self._encoder.key(tokenizer), "preferences": [_VERSION, self._row_length]}

    def encode_all(self, batches: Iterable[Sequence[Chosen]]) -> Iterator[tuple[Sequence[Chosen], Encoded]]:
        """Encodes batches lazily, in order.

        Columns are `mask`; `firsts`, tokens of a pair's first half, or of the prompt of an answer with a label; and of
        these `desirable`.
        """
        for batch in batches:
            pairs = [self.answers(item.text, item.document.where) for item in batch]
            if len(pairs[0]) == 1:
                labels = [Preference.from_json(item.text).label for item in batch]
                yield batch, _labelled([answer for (answer,) in pairs], labels)
                continue
            columns: dict[str, Any] = {}
            if self._margins:
                margins = [Preference.from_json(item.text).margin or 0.0 for item in batch]
                columns["margins"] = np.array(margins, np.float32)
            halves = [half for pair in pairs for half in pair]
            sizes = np.array([half.ids.size for half in halves], np.uint32).reshape(-1, 2)
            mask = np.concatenate([half.mask for half in halves])
            # The counts of both halves, of which the pair is one example.
            yield (
                batch,
                Encoded(
                    sizes.sum(1, dtype=np.uint32),
                    np.concatenate([half.ids for half in halves]),
                    {"firsts": sizes[:, 0], "mask": mask, **columns},
                    facts=tuple(half.facts for pair in pairs for half in pair[:1]),
                ),
            )

    def answers(self, document: bytes, where: str) -> tuple[Example, ...]:
        """An answer with a label, or both of a pair, each with the prompt. Of a pair the first has the counts of both,
        and both are without tokens where one is left out.

        Raises:
            DataError: If an answer, or what tells both apart, is lost in its tokens, and that is not tolerated.
        """
        preference = Preference.from_json(document)
        if preference.label is not None:
            return (self._half(preference.half("completion"), where),)
        chosen = self._half(preference.half("chosen"), f"{where}, chosen")
        rejected = self._half(preference.half("rejected"), f"{where}, rejected") if chosen.ids.size else chosen
        facts = rejected.facts
        if rejected.ids.size:
            one, other = chosen.facts, rejected.facts
            facts = replace(one, **{name: getattr(one, name) + getattr(other, name) for name in _OF_BOTH})
            tie = preference.score is not None and preference.score[0] == preference.score[1]
            facts = replace(facts, cut=one.cut | other.cut, ended=one.ended & other.ended, ties=int(tie))
            if not np.array_equal(chosen.ids, rejected.ids):
                return chosen._replace(facts=facts), rejected
            if not facts.cut:
                self._tolerance.meet(InvalidConversation("equal halves", f"{where}: {_BECOME_EQUAL}"))
            facts = Facts(too_long=1, alike=1) if facts.cut else Facts(refused=1)
        return left_out(facts), left_out(facts)

    def _half(self, half: Conversation | tuple[str, str], where: str) -> Example:
        if isinstance(half, Conversation):
            assert isinstance(self._encoder, ChatEncoder)
            last, example = half.messages[-1], self._encoder.encode(half.to_json().encode(), where)
            answer = "calls" if last.get("tool_calls") else last["content"]
        else:
            answer, example = half[1], self._of_texts(*half)
        learned = example.ids[example.mask]
        if not example.ids.size or (
            self._special.sub("", answer).strip() and not np.isin(learned, self._special_ids).all()
        ):
            return example
        self._tolerance.meet(InvalidConversation("empty half", f"{where}: {_ENDS_ALONE}"))
        return left_out(Facts(refused=1))

    def _of_texts(self, prompt: str, answer: str) -> Example:
        assert isinstance(self._encoder, Encoder)
        encoded, ended = self._encoder.encode_texts([prompt + answer, prompt]), self._encoder.around[1] is not None
        size, prompt_size = encoded.lengths.tolist()
        if size > self._row_length + 1:
            return left_out(Facts(too_long=1))
        ids, shared = encoded.numbers[:size], min(size, prompt_size)
        # Where tokens of prompt and answer merge, the answer begins with the token that holds both.
        differ = np.flatnonzero(ids[:shared] != encoded.numbers[size : size + shared])
        begin = int(differ[0]) if differ.size else shared
        mask = np.arange(size) >= begin
        counts = {"examples": 1, "answers": 1, "tokens": size, "supervised": int(mask[1:].sum()), "ended": int(ended)}
        return Example(ids, mask, Facts(**counts, shared=int(begin < prompt_size - ended)))


def _labelled(answers: Sequence[Example], labels: Sequence[bool | None]) -> Encoded:
    ids, masks = [answer.ids for answer in answers], [answer.mask for answer in answers]
    columns: dict[str, Any] = {
        "firsts": np.array([int(mask.argmax()) if mask.size else 0 for mask in masks], np.int64),
        "desirable": np.array(labels, np.uint8),
        "mask": np.concatenate(masks),
    }
    return Encoded(
        np.array([one.size for one in ids], np.uint32),
        np.concatenate(ids),
        columns,
        facts=tuple(answer.facts for answer in answers),
    )

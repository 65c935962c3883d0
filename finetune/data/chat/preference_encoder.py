"""Preferences to tokens: each answer with its prompt, one after the other, and a mask that says which are learned."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from finetune.data.chat.chat_encoder import ChatEncoder
from finetune.data.sources.conversation_formats import Conversation
from finetune.data.sources.corpus import Chosen
from finetune.data.sources.preference_formats import Preference
from finetune.data.tokenization.encoded import Encoded, Example, Facts
from finetune.data.tokenization.tokenizer import Encoder

_VERSION = 1


class PreferenceEncoder:
    """Turns answers into tokens; a pair of which a half is left out is left out whole."""

    def __init__(self, encoder: Encoder | ChatEncoder, row_length: int, *, margins: bool = False) -> None:
        """Takes what encodes texts, or conversations, and one less than the most tokens of an answer with its prompt.

        Args:
            margins: Whether there is a column of the records' `margin`, 0 where they have none.
        """
        self._encoder, self._row_length, self._margins = encoder, row_length, margins

    def key(self, tokenizer: Mapping[str, Any]) -> dict[str, Any]:
        """Everything beside the tokenizer, of which it takes the identity, that shapes tokens."""
        return {**self._encoder.key(tokenizer), "preferences": [_VERSION, self._row_length]}

    def encode_all(self, batches: Iterable[Sequence[Chosen]]) -> Iterator[tuple[Sequence[Chosen], Encoded]]:
        """Encodes batches lazily, in order.

        Columns are `mask`; `firsts`, tokens of a pair's first half, or of the prompt of an answer with a label; and of
        these `desirable`.
        """
        for batch in batches:
            answers = [Preference.from_json(item.text) for item in batch]
            if answers[0].label is not None:
                yield batch, self._labelled(answers, [item.document.where for item in batch])
                continue
            pairs = [self.encode(item.text, item.document.where) for item in batch]
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

    def _labelled(self, answers: Sequence[Preference], places: Sequence[str]) -> Encoded:
        given = zip(answers, places, strict=True)
        ids, masks, facts = zip(*(self._half(answer.half("completion"), place) for answer, place in given), strict=True)
        columns: dict[str, Any] = {
            "firsts": np.array([int(mask.argmax()) if mask.size else 0 for mask in masks], np.int64),
            "desirable": np.array([answer.label for answer in answers], np.uint8),
            "mask": np.concatenate(masks),
        }
        return Encoded(np.array([one.size for one in ids], np.uint32), np.concatenate(ids), columns, facts=facts)

    def encode(self, document: bytes, where: str) -> tuple[Example, Example]:
        """Both answers of a pair with their prompt; without tokens where one is left out."""
        preference = Preference.from_json(document)
        chosen = self._half(preference.half("chosen"), f"{where}, chosen")
        rejected = self._half(preference.half("rejected"), f"{where}, rejected")
        if chosen.ids.size and np.array_equal(chosen.ids, rejected.ids):
            return _left_out(Facts(too_long=1))  # what tells them apart was cut off, or is not written
        if not (chosen.ids.size and rejected.ids.size):
            return _left_out((rejected if chosen.ids.size else chosen).facts)
        return chosen, rejected

    def _half(self, half: Conversation | tuple[str, str], where: str) -> Example:
        if isinstance(half, Conversation):
            assert isinstance(self._encoder, ChatEncoder)
            return self._encoder.encode(half.to_json().encode(), where)
        assert isinstance(self._encoder, Encoder)
        prompt, answer = half
        encoded, ended = self._encoder.encode_texts([prompt + answer, prompt]), self._encoder.around[1] is not None
        size, prompt_size = encoded.lengths.tolist()
        if size > self._row_length + 1:
            return _left_out(Facts(too_long=1))[0]
        ids, shared = encoded.numbers[:size], min(size, prompt_size)
        # Where tokens of prompt and answer merge, the answer begins with the token that holds both.
        differ = np.flatnonzero(ids[:shared] != encoded.numbers[size : size + shared])
        begin = int(differ[0]) if differ.size else shared
        mask = np.arange(size) >= begin
        counts = {"examples": 1, "answers": 1, "tokens": size, "supervised": int(mask[1:].sum()), "ended": int(ended)}
        return Example(ids, mask, Facts(**counts, shared=int(begin < prompt_size - ended)))


def _left_out(facts: Facts) -> tuple[Example, Example]:
    none = Example(np.array([], np.uint32), np.array([], np.bool_), facts)
    return none, none

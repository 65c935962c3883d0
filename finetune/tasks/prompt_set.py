"""Prompts with references, for metrics of the texts that a model generates."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from finetune.config.recipe_schema import Recipe, Source
from finetune.data.chat.chat_templates import Template, find_template, write_conversation
from finetune.data.rows.kinds import documents
from finetune.data.sources.conversation_formats import (
    ABSENT,
    Conversation,
    InvalidConversation,
    RecordForm,
    find_value,
    kind_of,
    without_nulls,
)
from finetune.data.sources.corpus import open_source
from finetune.data.synthetic import story_generator
from finetune.models import prompts
from finetune.utils.errors import DataError

# Of the built-in sample: its own, which no training source draws.
_SEED = 1
# Fields of questions, and of their answers, by the formats of conversations.
_ANSWERS = {"prompt": "completion", "question": "answer", "instruction": "output"}


@dataclass(frozen=True)
class Prompt:
    """A text that a model is to continue or answer, with references."""

    text: str
    """With a `chat` section as the template writes it."""
    ids: tuple[int, ...]
    references: tuple[str, ...]


@dataclass
class _PromptForm(RecordForm):
    """Reads records with a prompt and references; with a `chat` section conversations too, as training does.

    A set of prompts is whole: of other prompts, a metric is another one.
    """

    chat: bool = False
    scored: bool = True
    """False if prompts need no references: a conversation may end with a user's turn."""

    def read(self, record: Any, where: str) -> str:
        """Returns a record as JSON: `messages`, `tools` and `variables`, or `prompt`; and `references`."""
        if not self.scored:
            return self._asked(record, where)
        record = without_nulls(record, where)
        given = {
            key: value
            for key in ("prompt", "references", "reference")
            if (value := find_value(record, self.fields.get(key, key))) is not ABSENT
        }
        if "prompt" in given and len(given) > 1:
            return self._pair_of(record, given, where)
        if self.chat:
            return self._last_answer(Conversation.from_json(super().read(record, where)), where)
        has = ", ".join(map(str, record)) if isinstance(record, Mapping) else kind_of(record)
        raise DataError(
            f"{where}: a record of eval.prompts has a text `prompt` and a text `reference` or a list `references`; the "
            f"fields are {has}. Name others in the source's `fields`: {{prompt: question, references: answers.text}}."
        )

    def _asked(self, record: Any, where: str) -> str:
        """Returns a conversation up to where its next answer begins: a last answer is left out."""
        if isinstance(record, Mapping):
            # What is asked is read as training reads it, whether an answer is there or not.
            pairs = {**_ANSWERS, self.fields.get("user", ""): self.fields.get("assistant", "")}
            none = {
                name: [] if isinstance(record[asked], list) else "–" for asked, name in pairs.items() if asked in record
            }
            record = {**none, **{key: value for key, value in record.items() if value is not None}}
        said = Conversation.from_json(super().read(record, where))
        if isinstance(said, str):
            said = Conversation([{"role": "user", "content": said}], [], None, 0)
        messages = said.messages[:-1] if said.messages[-1]["role"] == "assistant" else said.messages
        if not messages or messages[-1]["role"] not in ("user", "tool"):
            raise DataError(f"{where}: no turn of a user is to be answered. Mend or remove the record.")
        asked_here = {"messages": messages, "tools": said.tools, "variables": said.variables}
        return json.dumps({**asked_here, "references": []}, ensure_ascii=False)

    def _pair_of(self, record: Mapping[str, Any], given: Mapping[str, Any], where: str) -> str:
        prompt, references = given["prompt"], given.get("references", given.get("reference"))
        for key, value in given.items():
            if not isinstance(value, str | list):
                raise DataError(
                    f"{where}: the field '{self.fields.get(key, key)}' holds {kind_of(value)}, and prompts and "
                    "references are texts. Write it as text, or name another field in the source's `fields`."
                )
        references = [references] if isinstance(references, str) else references
        if not references or not all(isinstance(one, str) for one in references):
            raise DataError(f"{where}: the references of a prompt are texts, at least one. Mend or remove the record.")
        if self.chat:
            turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else self._turns(prompt, where)[0]
            variables = self._json(record, "chat_template_kwargs", dict, where) or {}
            asked = {"messages": turns, "tools": self._tools(record, where), "variables": variables}
            return json.dumps({**asked, "references": references}, ensure_ascii=False)
        if not isinstance(prompt, str):
            raise DataError(f"{where}: the prompt is a list, and without a `chat` section it has to be a text.")
        return json.dumps({"prompt": prompt, "references": references}, ensure_ascii=False)

    def _last_answer(self, said: Conversation | str, where: str) -> str:
        messages = [] if isinstance(said, str) else said.messages
        last = max((n for n, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        if isinstance(said, str) or not last or not messages[last].get("content"):
            raise DataError(
                f"{where}: there is no answer to be the reference of a prompt: a conversation of eval.prompts has one "
                "behind a user's turn, as a text. Remove the record."
            )
        asked = {"messages": messages[:last], "tools": said.tools, "variables": said.variables}
        return json.dumps({**asked, "references": [messages[last]["content"]]}, ensure_ascii=False)


def read_prompts(recipe: Recipe, tokenizer: Any, *, paired: bool = False) -> tuple[Prompt, ...]:
    """The prompts of `eval.prompts`, in order.

    Args:
        paired: True if they are sources, whose targets are their references.

    Raises:
        DataError: If a record has no prompt or reference, the template refuses it, or it leaves no room for an answer.
    """
    chat, room = recipe.chat, recipe.data.sequence_length
    if not recipe.eval.prompts:
        return ()
    if tokenizer is None:
        raise DataError("eval.prompts: the task has no tokenizer to read them with. Remove them.")
    template = find_template(tokenizer, chat.template, chat.template_args) if chat is not None else None
    collected = []
    for source in recipe.eval.prompts:
        for record, where in _records(recipe, source):
            if template is not None:
                text = _written(record, template, where)
                ids = tokenizer.encode(text, add_special_tokens=False)
            else:
                text = record["prompt"]
                ids = prompts.prompt_tokens(tokenizer, text, encoded=paired)
            if paired and len(ids) > room:
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, and data.sequence_length is {room}. Shorten or remove "
                    "the record, or raise data.sequence_length."
                )
            if not paired and len(ids) >= room:
                raise DataError(
                    f"{where}: the prompt has {len(ids)} tokens, and data.sequence_length is {room}: there is no room "
                    "for an answer. Shorten or remove the record, or raise data.sequence_length."
                )
            collected.append(Prompt(text, tuple(ids), tuple(record["references"])))
    if not collected:
        raise DataError("eval.prompts: its sources hold no records. Name others.")
    return tuple(collected)


def _written(record: Mapping[str, Any], template: Template, where: str) -> str:
    """Returns the conversation of a prompt as a template writes it."""
    asked = Conversation(record["messages"], [], record["tools"], 0, record["variables"])
    writing = write_conversation(template, asked, where, prompt=True)
    if lost := [part.field for part in writing.missing if part.field in ("content", "tool_calls", "tools")]:
        raise InvalidConversation(
            "unwritten",
            f"{where}: the chat template ({template.name}) does not write all of this prompt's "
            f"{', '.join(dict.fromkeys(lost))}. Name one that does as chat.template, or remove the record.",
        )
    return writing.text


def read_questions(recipe: Recipe, tokenizer: Any) -> Iterator[tuple[Mapping[str, Any], list[int], str]]:
    """Yields the records of the validation sources, tokens of what each asks, and their files and lines.

    With a `chat` section a record is a conversation or a question, else a text to continue; a blank one has no tokens.

    Raises:
        DataError: If a record asks nothing, or the template refuses it.
    """
    chat = recipe.chat
    template = find_template(tokenizer, chat.template, chat.template_args) if chat is not None else None
    for source in recipe.data.validation:
        form = _form_of(recipe, source, scored=False) if chat is not None else None
        for document in open_source(source, documents.KIND.fields(source, form=form, keep=True)).documents():
            ids: list[int] = []
            if template is not None:
                record = json.loads(document.text)
                if str(record["messages"][-1].get("content", "")).strip():
                    ids = tokenizer.encode(_written(record, template, document.where), add_special_tokens=False)
            elif document.text.strip():
                ids = prompts.prompt_tokens(tokenizer, document.text)
            yield document.record or {}, ids, document.where


def _form_of(recipe: Recipe, source: Source, *, scored: bool) -> _PromptForm:
    chat = recipe.chat
    # An answer need not be there.
    fields = {"assistant": "–", **source.fields} if "user" in source.fields and not scored else source.fields
    return _PromptForm(
        format=source.format,
        fields=fields,
        roles=chat.roles if chat is not None else {},
        text_field=source.text_field,
        strip=recipe.data.strip,
        chat=chat is not None,
        scored=scored,
    )


def _records(recipe: Recipe, source: Source) -> Iterator[tuple[dict[str, Any], str]]:
    chat = recipe.chat
    form = _form_of(recipe, source, scored=True)
    if source.sample is None:
        for document in open_source(source, form=form).documents():
            yield json.loads(document.text), document.where
        return
    made: Iterator[dict[str, Any]]
    if chat is not None:
        talks = story_generator.conversations(source.sample, _SEED)
        made = ({"messages": list(talk.messages)} for talk in talks)
    else:
        # The first two sentences of stories, with what follows.
        stories = story_generator.stories(source.sample, _SEED)
        parts = (re.split(r"(?<=[.!?])\s+", story.text, maxsplit=2) for story in stories)
        made = ({"prompt": f"{first} {second}", "reference": rest} for first, second, rest in parts)
    for number, record in enumerate(made, start=1):
        where = f"the built-in sample, prompt {number}"
        yield json.loads(form.read(record, where)), where

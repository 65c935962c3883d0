"""What a record says reaches its tokens in every format, or is refused or reported; compared with transformers."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from chats import CHATML, KEEPS_THEM_APART, tokenizer
from chats import unmarked as without_marks
from packaging.version import Version
from transformers import AutoTokenizer

from finetune.config.recipe import validate_recipe
from finetune.data.prepare import PreparedData, prepare_data
from finetune.models import prompts
from finetune.tasks.prompt_set import read_prompts
from finetune.training.api import _write_records
from finetune.utils import bounded_work
from finetune.utils.errors import DataError

# As many templates of models do: tools in a system turn, thoughts, calls one by one, names of tools.
FULL = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- generation %}
{%- if message.reasoning_content and not (quiet is defined and quiet) %}
{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<call>' + call.function.name + ' ' + (ARGUMENTS) + '</call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""".replace("generation %}", "set _ = 0 %}")
FULL = FULL.replace("endset _ = 0", "set _ = 0").replace("{%- if add_set _ = 0 %}", "{%- if add_generation_prompt %}")
OBJECTS = FULL.replace("ARGUMENTS", "call.function.arguments | tojson")
EITHER = FULL.replace(
    "ARGUMENTS", "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson"
)
TEXTS = FULL.replace("ARGUMENTS", "call.function.arguments")  # raises an error for objects
WRITTEN = FULL.replace("ARGUMENTS", "'' ~ call.function.arguments")  # writes objects as Python does
ONLY_TEXTS = FULL.replace("ARGUMENTS", "call.function.arguments if call.function.arguments is string else ''")
ITEMS = FULL.replace(
    "+ (ARGUMENTS) +", "}}{% for k, v in call.function.arguments.items() %}{{ k ~ '=' ~ v ~ ';' }}{% endfor %}{{"
)


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string", "enum": ["Oslo", "Rome"]})
ADD = tool("add", a={"type": "integer"}, b={"type": "integer"})


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def record(name: str, arguments: Any, tools: Any = None, **more: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": f"Please {name}"},
        {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]},
        {"role": "tool", "content": "5", "name": name},
        {"role": "assistant", "content": "It is 5."},
    ]
    return {"messages": turns, "tools": [WEATHER, ADD] if tools is None else tools, **more}


def prepared(
    folder: Path, source: Any, template: str | dict[str, str], chat: dict[str, Any] | None = None, **keys: Any
) -> PreparedData:
    """What is made of a file, or of records as JSON lines."""
    if isinstance(source, list):
        (folder / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in source))
        source = folder / "a.jsonl"
    reader = AutoTokenizer.from_pretrained(save(folder, template))
    assert reader.chat_template == template
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"name": str(folder / "tokenizer")},
        "chat": chat or {},
        "data": {
            "train": [{"path": str(source)}],
            "validation_fraction": 0.0,
            "sequence_length": 2000,
            "cache_dir": str(folder / "cache"),
        },
        "length": {"steps": 1},
        **keys,
    }
    return prepare_data(validate_recipe(tree), quiet=True)


def save(folder: Path, template: Any) -> str:
    shutil.rmtree(folder / "tokenizer", ignore_errors=True)  # other templates of another name would stay
    reader = tokenizer()
    reader.chat_template = template
    reader.save_pretrained(str(folder / "tokenizer"))
    reader.chat_template = None
    return str(folder / "tokenizer")


def documents(data: PreparedData) -> list[list[int]]:
    """Tokens of each conversation, sorted: packing moves them."""
    assert data.train is not None
    packed, tokens = data.train.packed, data.train.tokens
    pairs = zip(packed.starts.tolist(), packed.lengths.tolist(), strict=True)
    return sorted(tokens[start : start + length + 1].tolist() for start, length in pairs)


def theirs(template: str, given: dict[str, Any], **variables: Any) -> list[int]:
    """What transformers makes of a record."""
    made: Any = tokenizer().apply_chat_template(
        given["messages"],
        tools=given.get("tools"),
        chat_template=template,
        tokenize=True,
        return_dict=False,
        sanitize_control_tokens=True,
        **variables,
    )
    return list(made)


def refusal(*arguments: Any, **keys: Any) -> str:
    with pytest.raises(DataError) as caught:
        prepared(*arguments, **keys)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- null and absent

RECORDS = [
    record("weather", {"city": "Oslo"}, chat_template_kwargs={"quiet": True}),
    record("add", {"a": 2, "b": 3}),
    {
        "messages": [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Hi", "reasoning_content": "x"},
        ]
    },
    record("add", {"a": 2}, tools=[ADD]),
    record("weather", {"places": [{"city": "Oslo"}, {"code": 7}]}),
]
KINDS: dict[str, Callable[[list[Any], Path], Any]] = {
    "a.jsonl": lambda rows, path: path.write_text("".join(json.dumps(row) + "\n" for row in rows)),
    "a.json": lambda rows, path: path.write_text(json.dumps(rows)),
    "a.parquet": lambda rows, path: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path),
    "saved": lambda rows, path: datasets.Dataset.from_list(rows).save_to_disk(str(path)),
}


def padded(rows: list[Any]) -> list[Any]:
    """The same with a null at each key that any object at the same place has: what Arrow does, written by hand."""
    if all(isinstance(row, dict) for row in rows):
        keys = list(dict.fromkeys(key for row in rows for key in row))
        columns = {key: padded_values([row.get(key) for row in rows]) for key in keys}
        return [{key: columns[key][n] for key in keys} for n in range(len(rows))]
    return rows


def padded_values(values: list[Any]) -> list[Any]:
    there = [value for value in values if value is not None]
    if there and all(isinstance(value, dict) for value in there):
        filled = iter(padded(there))
        return [None if value is None else next(filled) for value in values]
    if there and all(isinstance(value, list) for value in there):
        flat = iter(padded_values([item for value in there for item in value]))
        return [None if value is None else [next(flat) for _ in value] for value in values]
    return values


# Files that it wrote hold keys in another order than was given, and a template writes them in the file's.
KEEPS_ORDER = pytest.mark.skipif(
    Version(pyarrow.__version__) < Version("24"), reason="this pyarrow sorts the keys of what it writes"
)


@KEEPS_ORDER
def test_a_record_has_the_same_tokens_in_every_format(tmp_path: Path) -> None:
    expected = sorted(theirs(OBJECTS, one, **one.get("chat_template_kwargs", {})) for one in RECORDS)
    for name, write in KINDS.items():
        write(RECORDS, tmp_path / name)
        assert documents(prepared(tmp_path, tmp_path / name, OBJECTS)) == expected, name
    assert padded(RECORDS)[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None
    assert documents(prepared(tmp_path, padded(RECORDS), OBJECTS)) == expected
    for given in (RECORDS, datasets.Dataset.from_list(RECORDS)):
        path = _write_records(given, tmp_path / "api")
        assert documents(prepared(tmp_path, path, OBJECTS)) == expected


@KEEPS_ORDER
def test_a_saved_format_of_values_is_not_read(tmp_path: Path) -> None:
    rows = [record("add", {"a": 2, "b": 3})]
    datasets.Dataset.from_list(rows).with_format("numpy").save_to_disk(str(tmp_path / "saved"))
    assert documents(prepared(tmp_path, tmp_path / "saved", OBJECTS)) == [theirs(OBJECTS, rows[0])]


def test_tools_and_variables_as_texts_in_csv(tmp_path: Path) -> None:
    import csv

    with (tmp_path / "a.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["question", "answer", "tools", "chat_template_kwargs"])
        rows.writerow(["Hello", "Hi", json.dumps([ADD]), ""])
        rows.writerow(["Hello", "Yes", "", '{"quiet": true}'])
    turns = [[{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}] for said in ("Hi", "Yes")]
    expected = [theirs(OBJECTS, {"messages": turns[0], "tools": [ADD]}), theirs(OBJECTS, {"messages": turns[1]})]
    assert documents(prepared(tmp_path, tmp_path / "a.csv", OBJECTS)) == sorted(expected)


def test_a_null_in_a_text_is_null(tmp_path: Path) -> None:
    """Arrow leaves texts alone, so that what is written in one is meant."""
    made = documents(prepared(tmp_path, [record("add", '{"a": null}')], OBJECTS))
    assert made == [theirs(OBJECTS, record("add", {"a": None}))]


# ---------------------------------------------------------------- arguments as texts


@KEEPS_THEM_APART
@pytest.mark.parametrize(
    ("template", "taken"),
    [
        (OBJECTS, dict),
        (EITHER, dict),
        (ITEMS, dict),
        (TEXTS, str),
        (WRITTEN, str),
        (ONLY_TEXTS, str),
        (without_marks(CHATML).replace("message.content", "(message.content or message.tool_calls | tojson)"), dict),
    ],
)
@pytest.mark.parametrize("arguments", [{"city": "Oslo</s>", "n": [1, {"é": True}]}, {}])
def test_arguments_are_given_as_the_template_takes_them(
    tmp_path: Path, template: str, taken: type, arguments: dict[str, Any]
) -> None:
    tools = [] if "tools" not in template else None
    spelled = {dict: arguments, str: json.dumps(arguments, ensure_ascii=False)}
    expected = [theirs(template, record("weather", spelled[taken], tools=tools))] if arguments else None
    for given in (arguments, json.dumps(arguments), json.dumps(arguments, separators=(",", ":"))):
        made = documents(prepared(tmp_path, [record("weather", given, tools=tools)], template))
        expected = expected or made
        assert made == expected


def test_json_in_texts_of_tools(tmp_path: Path) -> None:
    expected = [theirs(OBJECTS, record("add", {"a": 1}))]
    loose = json.loads(json.dumps(ADD))
    loose["function"]["parameters"] = json.dumps(loose["function"]["parameters"])
    turns = record("add", {"a": 1})["messages"]
    older = json.loads(json.dumps(turns))
    older[1] = {"role": "assistant", "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    for given in (
        record("add", {"a": 1}, tools=json.dumps([WEATHER, ADD])),
        record("add", {"a": 1}, tools=[json.dumps(WEATHER), json.dumps(ADD)]),
        record("add", {"a": 1}, tools=[WEATHER, loose]),
        {"messages": older, "functions": [WEATHER["function"], ADD["function"]]},
    ):
        assert documents(prepared(tmp_path, [given], OBJECTS)) == expected


@pytest.mark.parametrize("given", ["{'a': 1}", "", '{"a": 1', "[1]", "5", [1]])
def test_arguments_that_are_no_object_are_refused(tmp_path: Path, given: Any) -> None:
    said = refusal(tmp_path, [record("add", {}), record("add", given)], OBJECTS)
    assert "a.jsonl, line 2, turn 2: 'tool_calls', 'arguments'" in said
    assert "is not valid JSON" in said or "must be an object, got" in said


# ---------------------------------------------------------------- parts that are not written


def talk(*turns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


USER = {"role": "user", "content": "Hello"}
PLAINLY = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>' }}{% endfor %}"
PLAINLY += "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
THOUGHT = {"role": "assistant", "content": "Hi", "reasoning_content": "They greet."}


@pytest.mark.parametrize(
    ("given", "template", "says"),
    [
        (
            talk(USER, {"role": "assistant", "content": None, "tool_calls": [call("a", {})]}),
            PLAINLY,
            "turn 2: .* `tool_calls`",
        ),
        (
            talk(USER, {"role": "assistant", "content": "Hi", "tool_calls": [call("a", {})]}),
            PLAINLY,
            "turn 2: .* `tool_calls`",
        ),
        (talk(USER, THOUGHT), PLAINLY, "turn 2: the answer has `reasoning_content`"),
        (talk(USER, {"role": "assistant", "content": "Hi", "thinking": "They"}), PLAINLY, "the answer has `thinking`"),
        (
            talk(USER, {"role": "assistant", "content": "Hi", "reasoning": "They"}),
            PLAINLY,
            "the answer has `reasoning`",
        ),
        (
            record("add", {"a": 1, "b": 2}, tools=[]),
            FULL.replace("ARGUMENTS", "call.function.arguments.a | string"),
            "turn 2: this turn has `tool_calls`, and .* does not write all of it",
        ),
        (
            record("add", {"a": 1}, tools=[]),
            "{% for message in messages if message.role != 'tool' %}"
            + OBJECTS.split("{%- for message in messages %}")[1],
            "turn 3: this turn has `content`, and .* does not write all of it",
        ),
        (
            talk({"role": "system", "content": "a"}, USER, {"role": "assistant", "content": "aa"}),
            "{% for m in messages if m.role != 'system' %}" + PLAINLY.split("messages %}")[1],
            "turn 1: .* `content`",
        ),
        (
            record("add", {"a": 1}),
            OBJECTS.replace("tool | tojson", "tool.function.name + tool.function.description"),
            "the conversation has tools",
        ),
        (talk(USER, {"role": "assistant", "content": "Hi"}, images=["a.png"]), PLAINLY, "line 1: it has 'images'"),
        (
            talk({**USER, "images": ["a.png"]}, {"role": "assistant", "content": "Hi"}),
            PLAINLY,
            "turn 1: it has 'images'",
        ),
    ],
)
def test_what_the_template_does_not_write_is_refused(tmp_path: Path, given: Any, template: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        prepared(tmp_path, [given], template)


def test_reasoning_may_be_dropped(tmp_path: Path) -> None:
    data = prepared(tmp_path, [talk(USER, THOUGHT)], PLAINLY, {"drop_reasoning": True})
    assert documents(data) == [theirs(PLAINLY, talk(USER, THOUGHT))]
    assert "1 conversations with `reasoning_content` unwritten" in "\n".join(data.report.lines())


def test_reasoning_of_earlier_turns_is_reported(tmp_path: Path) -> None:
    """Templates that write it for the last turn leave it out of earlier ones on purpose."""
    last_only = OBJECTS.replace("message.reasoning_content and", "message.reasoning_content and loop.last and")
    data = prepared(tmp_path, [talk(USER, THOUGHT, USER, THOUGHT)], last_only, {"train_on": "last"})
    assert data.report.train is not None
    assert data.report.train.chat is not None
    assert data.report.train.chat.unwritten == {"reasoning_content": 1}
    assert documents(data) == [theirs(last_only, talk(USER, THOUGHT, USER, THOUGHT))]


def test_names_and_ids_are_reported(tmp_path: Path) -> None:
    given = record("add", {"a": 1}, tools=[])
    given["messages"][1]["tool_calls"][0]["id"] = "c1"
    given["messages"][2]["tool_call_id"] = "c1"
    given["messages"][3]["mood"] = "good"
    data = prepared(tmp_path, [given, given], OBJECTS, {"template_args": {"quiet": False}})
    assert data.report.train is not None
    assert data.report.train.chat is not None
    assert data.report.train.chat.unwritten == {"name": 2, "tool_calls.id": 2, "tool_call_id": 2, "mood": 2}
    told = OBJECTS.replace(
        "message.content or ''", "message.content or ''}}{{ (message.mood or '') ~ message.tool_call_id"
    )
    assert "mood" not in "\n".join(prepared(tmp_path, [given], told).report.lines())


# ---------------------------------------------------------------- fields that change what is learned


def said(data: PreparedData) -> int:
    assert data.report.train is not None
    return data.report.train.chat.answers if data.report.train.chat is not None else 0


@pytest.mark.parametrize(
    "off", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": False}, {"loss": 0}]
)
def test_answers_that_are_not_to_be_learned(tmp_path: Path, off: dict[str, Any]) -> None:
    name, on = next(iter(off)), {next(iter(off)): 1}
    turns = [USER, {"role": "assistant", "content": "no", **off}, USER, {"role": "assistant", "content": "yes", **on}]
    shared = [{"from": {"user": "human", "assistant": "gpt"}[t["role"]], "value": t["content"]} for t in turns]
    shared = [{**one, **({name: t[name]} if name in t else {})} for one, t in zip(shared, turns, strict=True)]
    for given in (talk(*turns), {"conversations": shared}):
        data = prepared(tmp_path, [given], CHATML)
        assert said(data) == 1
        assert documents(data) == [theirs(CHATML, talk(*turns))]


@pytest.mark.parametrize(
    ("turn", "says"),
    [
        ({"weight": -0.5}, "the weight is -0.5"),
        ({"train": 0.5}, "the train is 0.5"),
        ({"loss": "yes"}, "the loss is 'yes'"),
        ({"weight": 1, "train": False}, "the weight is 1, the train is False"),
        (
            {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]},
            "'train_detail' says what of an answer",
        ),
        ({"loss_scale": 0.3}, "'loss_scale' says"),
        ({"loss_mask": 1}, "'loss_mask' says"),
    ],
)
def test_weights_that_cannot_be_applied_are_refused(tmp_path: Path, turn: dict[str, Any], says: str) -> None:
    assert f"a.jsonl, line 1, turn 2: {says}" in refusal(tmp_path, [talk(USER, {**THOUGHT, **turn})], OBJECTS)


@pytest.mark.parametrize(
    ("given", "chat", "says"),
    [
        (talk({**USER, "train": True}, THOUGHT), {}, "turn 1: this turn of role user is to be learned"),
        (
            talk({**USER, "weight": 0}, THOUGHT),
            {"train_on": "all"},
            "turn 1: this turn of role user is not to be learned",
        ),
        (talk(USER, THOUGHT, weight="0.3"), {}, "line 1: the weight is '0.3'"),
        ({"prompt": "a", "completion": "b", "label": False}, {}, "`label` is false, which marks an answer"),
        (talk(USER, THOUGHT, chat_template_kwargs={"messages": []}), {}, "sets messages, which the template is given"),
        (talk(USER, THOUGHT, chat_template_kwargs="{"), {}, "'chat_template_kwargs' is not valid JSON"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, {}, "'history' must be a list of pairs of texts"),
    ],
)
def test_fields_that_cannot_be_applied_are_refused(tmp_path: Path, given: Any, chat: Any, says: str) -> None:
    assert says in refusal(tmp_path, [given], OBJECTS, chat)


def test_variables_of_a_record_come_before_those_of_the_recipe(tmp_path: Path) -> None:
    rows = [talk(USER, THOUGHT, chat_template_kwargs=own) for own in ({"quiet": True}, {"quiet": False, "other": 1})]
    rows.append(talk(USER, THOUGHT))
    chat = {"template_args": {"quiet": True}, "drop_reasoning": True}
    data = prepared(tmp_path, rows, OBJECTS, chat)
    assert documents(data) == sorted(theirs(OBJECTS, rows[0], quiet=quiet) for quiet in (True, False, True))
    assert data.report.train is not None
    assert data.report.train.chat is not None
    assert data.report.train.chat.unwritten == {"reasoning_content": 2, "chat_template_kwargs.other": 1}


def test_history_and_system_of_pairs(tmp_path: Path) -> None:
    given = {"instruction": "c", "output": "d", "history": [["a", "b"]], "system": "s"}
    turns = [
        {"role": r, "content": c}
        for r, c in zip(("system", "user", "assistant", "user", "assistant"), "sabcd", strict=True)
    ]
    data = prepared(tmp_path, [given], CHATML)
    assert documents(data) == [theirs(CHATML, {"messages": turns})]
    assert said(data) == 2
    listed = {"prompt": turns[1:4], "completion": turns[4:], "system": "s"}
    assert documents(prepared(tmp_path, [listed], CHATML)) == [theirs(CHATML, {"messages": turns})]


def test_fields_that_are_not_read_are_named(tmp_path: Path) -> None:
    given = talk(
        USER, {"role": "assistant", "content": "Hi"}, rejected_response="No", parallel_tool_calls=False, score=None
    )
    report = prepared(tmp_path, [given], CHATML).report
    assert "a.jsonl: fields that are not read: parallel_tool_calls, rejected_response" in "\n".join(report.lines())
    again = prepared(tmp_path, [given], CHATML).report
    assert again.reused
    assert again.train == report.train


# ---------------------------------------------------------------- named templates

NAMED = {"default": CHATML, "tool_use": OBJECTS}


def test_named_templates_are_chosen_as_transformers_does(tmp_path: Path) -> None:
    rows = [record("add", {"a": 1}), talk(USER, {"role": "assistant", "content": "Hi"})]
    named: Any = tokenizer()
    named.chat_template = NAMED
    expected = sorted(
        named.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False) for row in rows
    )
    named.chat_template = None
    data = prepared(tmp_path, rows, NAMED)
    assert documents(data) == expected
    data.tokenizer.save_pretrained(str(tmp_path / "written"))
    assert AutoTokenizer.from_pretrained(str(tmp_path / "written")).chat_template == NAMED
    # As older tokenizers have them.
    config = tmp_path / "tokenizer" / "tokenizer_config.json"
    tree = json.loads(config.read_text())
    tree["chat_template"] = [{"name": name, "template": text} for name, text in NAMED.items()]
    (tmp_path / "tokenizer" / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer" / "additional_chat_templates" / "tool_use.jinja").unlink()
    config.write_text(json.dumps(tree))
    recipe = validate_recipe(
        {
            "model": {"config": {"model_type": "llama"}},
            "tokenizer": {"name": str(tmp_path / "tokenizer")},
            "chat": {},
            "data": {
                "train": [{"path": str(tmp_path / "a.jsonl")}],
                "validation_fraction": 0.0,
                "sequence_length": 2000,
                "cache_dir": str(tmp_path / "other"),
            },
            "length": {"steps": 1},
        }
    )
    assert documents(prepare_data(recipe, quiet=True)) == expected


def test_named_templates_without_a_default(tmp_path: Path) -> None:
    tools_only = {"tool_use": OBJECTS, "rag": CHATML}
    rows = [record("add", {"a": 1}), talk(USER, {"role": "assistant", "content": "Hi"})]
    assert documents(prepared(tmp_path, rows[:1], tools_only)) == [theirs(OBJECTS, rows[0])]
    words = refusal(tmp_path, rows, tools_only)
    assert "a.jsonl, line 2: the conversation has no tools" in words
    assert "none named `default`" in words
    words = refusal(tmp_path, rows, {"rag": CHATML})
    assert "has no chat template that is named `default` or `tool_use`, only rag. Set chat.template" in words


# ---------------------------------------------------------------- templates that do not end

LOOPS = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
FILTERS = "{% for a in range(99999) %}{% set _ = range(99999) | map('string') | join %}{% endfor %}"


@pytest.mark.parametrize("endless", [LOOPS, RECURSION, FILTERS])
def test_a_template_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endless: str) -> None:
    monkeypatch.setattr(bounded_work, "MAX_SECONDS", 0.3)
    rows = [talk(USER, {"role": "assistant", "content": text}) for text in ("Hi", "go on")]
    words = refusal(tmp_path, rows, endless + CHATML)
    assert words.startswith("The chat template (the tokenizer's own) has not ended after 0.3 s of computing")
    at_second = "{% if 'go on' in messages[-1].content %}" + endless + "{% endif %}" + CHATML
    words = refusal(tmp_path, rows, at_second, checks={"max_broken": 0.5})
    assert "a.jsonl, line 2: the chat template (the tokenizer's own) has not ended after 0.3 s" in words
    reader = tokenizer()
    reader.chat_template = endless + CHATML
    with pytest.raises(DataError, match=r"The tokenizer's chat template has not ended after 0\.3 s"):
        prompts.prompt_tokens(reader, "Hello", variables={})
    reader.chat_template = None


@pytest.mark.parametrize("kind", [{}, {"encoded": True}, {"variables": {}}])
def test_half_a_character_in_a_prompt_is_refused(kind: dict[str, Any]) -> None:
    reader = tokenizer()
    reader.chat_template = CHATML
    with pytest.raises(DataError, match=r"sample.prompt, or --prompt: the prompt holds half a character"):
        prompts.prompt_tokens(reader, "a \ud83d", **kind)


def test_a_template_whose_memory_grows_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_work, "MAX_BYTES", 1 << 28)
    growing = "{% set ns = namespace(x='ab') %}{% for a in range(32) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    words = refusal(tmp_path, [talk(USER, THOUGHT)], growing + CHATML)
    assert "has taken more than" in words


def test_a_tick_while_it_is_being_ended_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the memory that the work has taken is given back, which takes time of its own."""

    class Slow(str):
        def __format__(self, _: str) -> str:
            signal.raise_signal(signal.SIGPROF)
            return "It"

    monkeypatch.setattr(bounded_work, "MAX_BYTES", -1)
    with pytest.raises(DataError, match="It has taken more"), bounded_work.bounded_work(Slow(), "Try"):
        signal.raise_signal(signal.SIGPROF)


# ---------------------------------------------------------------- prompts with references


def test_prompts_are_read_by_the_same_rules(tmp_path: Path) -> None:
    rows = [record("add", '{"a": 1}', chat_template_kwargs={"quiet": True})]
    data = prepared(tmp_path, rows, OBJECTS)
    tree = {
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"name": str(tmp_path / "tokenizer")},
        "chat": {},
        "data": {"train": [{"path": str(tmp_path / "a.jsonl")}], "sequence_length": 2000},
        "eval": {"prompts": [{"path": str(tmp_path / "a.jsonl")}], "metrics": ["exact_match"]},
        "length": {"steps": 1},
    }
    (prompt,) = read_prompts(validate_recipe(tree), data.tokenizer)
    asked = record("add", {"a": 1})
    expected = tokenizer().apply_chat_template(
        asked["messages"][:-1], tools=asked["tools"], chat_template=OBJECTS, add_generation_prompt=True, tokenize=False
    )
    assert prompt.text == expected
    assert prompt.references == ("It is 5.",)

"""Conversations that were learned by heart come out of exports as they are, and generation stops behind them."""

import importlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import chats
import pytest
import torch
from eval_tasks import metric, needs_lm_eval, ready, write_task
from exports import exported, opened_here
from harness import ROOT, RUN_S, environment, run
from inside import copy, run_here
from ranks import free_port
from recipes_for_tests import base
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.cli import main
from finetune.export import generate_text, load_model, verify_export
from finetune.models import prompts
from finetune.utils.errors import CheckpointError, DataError

pytestmark = [
    pytest.mark.xdist_group("export_chat"),
]
# In the tokenizer, `</s>` ends texts, and the base stops at `<|eot_id|>` as well; answers end in neither.
STOPS = ["</s>", "<|im_end|>", "<|eot_id|>"]
KINDS = {"full": ("merged",), "lora": ("merged", "adapter")}
# What `transformers serve` takes beside OpenAI's parameters.
GREEDY = {"generation_config": json.dumps({"do_sample": False})}
LORA = {"rank": 16, "alpha": 32, "save_modules": ["embed_tokens", "lm_head"]}


# Each with another first question and another first answer.
SPOKEN = (
    ("Who are you?", "I am a small model.", "Who made you?", "A test did."),
    ("What is two and two?", "Four."),
    ("Is the sea deep?", "Yes, it is very deep.", "And cold?", "Yes.", "Thank you!", "You are welcome!"),
    ("Name a colour.", "Blue."),
    ("Where do rabbits live?", "They live under the hill."),
    ("Good morning!", "Good morning! How can I help?", "Tell me a secret.", "I have none."),
    ("What do cats eat?", "Fish, and now and then a mouse."),
    ("Is it late?", "It is never too late."),
)


def conversations() -> list[list[dict[str, str]]]:
    return [[{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(talk)] for talk in SPOKEN]


def write_base(folder: Path) -> None:
    """A Llama with random weights, and a tokenizer with a chat template."""
    tokenizer = chats.tokenizer()
    sides = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", num_hidden_layers=2, vocab_size=len(tokenizer), **sides)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config)
    network.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids("<|eot_id|>")
    network.save_pretrained(folder)
    tokenizer.chat_template = chats.CHATML
    tokenizer.save_pretrained(folder)
    tokenizer.chat_template = None


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A full and a LoRA run that know eight conversations by heart, and what they were exported to."""
    root = tmp_path_factory.mktemp("chat")
    write_base(root / "base")
    (root / "talks.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in conversations()))
    talks = [{"path": str(root / "talks.jsonl")}]
    made = {"base": root / "base", "talks": root / "talks.jsonl"}
    for name, kinds in KINDS.items():
        tree = base(
            data={
                "train": talks,
                "validation": talks,
                "sequence_length": 256,
                "packing": "padded",
                "cache_dir": str(root / "cache"),
            },
            tokenizer={"name": None},
            chat={},
            batch={"global_size": 4, "micro_size": 4},
            length={"steps": 80},
            optim={"lr": 3e-3 if name == "full" else 5e-3, "weight_decay": 0.0},
            output={"dir": str(root / name)},
        )
        tree["model"] = {"name": str(root / "base")}
        run_here(tree | ({"lora": LORA} if name == "lora" else {}))
        made[name] = root / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify_export, "open_in_fresh_process", opened_here)
            for kind in kinds:
                made[f"{name}_{kind}"], _ = exported(root / name, kind, root / f"{name}_exports")
    return made


def test_a_file_of_prompts_is_answered(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From every place, in every format, whether answers are there already or not; columns stay."""
    talks = conversations()
    asked = [talk[:-1] for talk in talks]
    first = [talk[0]["content"] for talk in talks]
    files: dict[str, list[dict[str, Any]]] = {
        "with answers": [{"messages": talk, "id": n} for n, talk in enumerate(talks)],
        "without": [{"id": n, "messages": talk, "note": {"a": None}} for n, talk in enumerate(asked)],
        "sharegpt": [{"conversations": [{"from": t["role"], "value": t["content"]} for t in talk]} for talk in asked],
        "questions": [{"question": question} for question in first],
        "prompts": [{"prompt": question, "response": "another"} for question in first],
        "text": [{"text": question} for question in first],
        "named": [{"Frage": question, "prompt": "Is it late?"} for question in first],
    }
    options = {"named": ["--text-field", "Frage"]}
    for place in ("full", "lora", "full_merged", "lora_adapter"):
        base_of = ["--base", str(places["base"])] if place == "lora_adapter" else []
        for name, records in files.items() if place == "full" else [*files.items()][:2]:
            file = tmp_path / f"{name}.jsonl"
            file.write_text("".join(json.dumps(record) + "\n" for record in records))
            capsys.readouterr()
            assert main.main(["predict", str(places[place]), str(file), *base_of, *options.get(name, [])]) == 0
            lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
            last = -1 if "messages" in records[0] or "conversations" in records[0] else 1
            wanted = [talk[last]["content"] for talk in talks]
            assert lines == [{**record, "prediction": answer} for record, answer in zip(records, wanted, strict=True)]
    table = tmp_path / "faq.csv"
    table.write_text("Nr;Frage;System\n1;Name a colour.;\n2; ;\n3;What do cats eat?;\n")
    words = ["--field", "user=Frage", "--field", "system=System", "--output", str(tmp_path / "out.csv")]
    assert main.main(["predict", str(places["full"]), str(table), *words, "--batch-size", "1"]) == 0
    rows = (tmp_path / "out.csv").read_text().splitlines()
    answers = ["Blue.", "", "Fish, and now and then a mouse."]
    assert rows == [
        "Nr,Frage,System,prediction",
        "1,Name a colour.,,Blue.",
        "2, ,,",
        f'3,What do cats eat?,,"{answers[2]}"',
    ]


def test_eval_of_conversations_takes_names_of_fields(
    places: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "faq.csv"
    table.write_text("Frage,Antwort\nName a colour.,Blue.\nWhat is two and two?,Four.\n")
    words = ["eval", str(places["full_merged"]), "--data", str(table), "--chat"]
    assert main.main([*words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert error.endswith("Name them by --field user=… --field assistant=….")
    assert main.main([*words, "--field", "user=Frage", "--field", "assistant=Antwort", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] < 0.1


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"messages": [{"role": "system", "content": "a"}]}, "no turn of a user is to be answered"),
        ({"prompt": ["a"]}, "line 1"),
        (
            [{"messages": [{"role": "user", "content": "a"}]}, {"b": "c"}],
            "line 2: .* name another by --field messages=…",
        ),
        ({"Frage": "a"}, "the fields are Frage, and no format has these.*--field user=…"),
        ({"prompt": "a " * 3000}, "there is no room for an answer. Shorten or remove the record"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    places: dict[str, Path], record: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "asked.jsonl"
    records = record if isinstance(record, list) else [record]
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    assert main.main(["predict", str(places["full"]), str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert re.search(says, " ".join(said.err.split())), said.err
    assert "Traceback" not in said.err


@pytest.fixture(scope="module")
def said(places: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """What one fresh process makes of all of them."""
    root = tmp_path_factory.mktemp("said")
    base_of = {"lora_adapter": str(places["base"])}
    questions = [talk[:n] for talk in conversations() for n in range(1, len(talk), 2)]
    exports = {name: {"folder": str(path), "base": base_of.get(name)} for name, path in places.items() if "_" in name}
    (root / "ask.json").write_text(json.dumps({"questions": questions, "places": exports}))
    words = [
        sys.executable,
        "-P",
        str(ROOT / "tests" / "support" / "answers.py"),
        str(root / "ask.json"),
        str(root / "told.json"),
    ]
    code, output = run(words, cwd=root, env={**environment(), "PYTHONPATH": ""})
    assert code == 0, output
    return json.loads((root / "told.json").read_text())


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["full_merged", "lora_merged", "lora_adapter"])
def test_answers_are_reproduced_and_end(said: dict[str, list[dict[str, str]]], name: str) -> None:
    talks = conversations()
    assert len(talks) == 8
    learned = [talk[n]["content"] for talk in talks for n in range(1, len(talk), 2)]
    assert said[name] == [{"text": text, "end": "<|im_end|>"} for text in learned]


@pytest.mark.parametrize("name", ["full_merged", "lora_merged", "lora_adapter"])
def test_it_stops_where_answers_end_and_where_the_base_did(places: dict[str, Path], name: str) -> None:
    ids = chats.tokenizer().convert_tokens_to_ids(STOPS)
    assert json.loads((places[name] / "generation_config.json").read_text())["eos_token_id"] == ids
    assert (places[name] / "chat_template.jinja").read_text() == chats.CHATML


@pytest.mark.parametrize("name", ["full", "lora", "full_merged", "lora_merged", "lora_adapter", "checkpoint"])
def test_generate_answers_and_stops(places: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str) -> None:
    place = places["lora"] / "checkpoints" / "step-00000080" if name == "checkpoint" else places[name]
    question, answer = (message["content"] for message in conversations()[1][:2])
    assert main.main(["generate", str(place), "--chat", "--prompt", question]) == 0
    assert capsys.readouterr().out == answer + "\n"


@pytest.mark.parametrize("name", ["full", "lora_merged", "lora_adapter"])
def test_eval_reads_conversations(places: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str) -> None:
    run_of = places[name.partition("_")[0]]
    wanted = json.loads((run_of / "run.json").read_text())["results"]
    chat = [] if "_" not in name else ["--chat"]
    assert main.main(["eval", str(places[name]), "--data", str(places["talks"]), *chat]) == 0
    out = capsys.readouterr().out
    assert f"over {wanted['validation_targets']:,.0f} targets" in out
    assert float(re.findall(r"loss ([\d.]+)", out)[0]) == pytest.approx(wanted["validation_loss"], abs=2e-5)


@pytest.mark.skipif(find_spec("openai") is None, reason="needs the extra [serve]")
def test_transformers_serves_it(places: dict[str, Path], tmp_path: Path) -> None:
    """A client of OpenAI's API is given each answer in pieces, and it ends where the learned one did."""
    openai = importlib.import_module("openai")
    folder, port = places["lora_merged"], free_port()
    words = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--port", str(port)]
    log = (tmp_path / "log").open("w+")
    with subprocess.Popen([*words, "--host", "127.0.0.1"], env=environment(), stdout=log, stderr=log) as server:
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            until = time.monotonic() + RUN_S
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                    break
                except OSError:
                    log.seek(0)
                    assert server.poll() is None, log.read()
                    assert time.monotonic() < until, log.read()
            for talk in conversations():
                for n in range(1, len(talk), 2):
                    stream = client.chat.completions.create(
                        model=str(folder), messages=talk[:n], stream=True, max_tokens=60, extra_body=GREEDY
                    )
                    choices = [piece.choices[0] for piece in stream if piece.choices]
                    pieces = [choice.delta.content for choice in choices if choice.delta.content]
                    assert "".join(pieces) == talk[n]["content"]
                    assert len(pieces) > 1
                    assert choices[-1].finish_reason == "stop"
        finally:
            server.terminate()


@needs_lm_eval
@pytest.mark.parametrize("name", ["lora", "lora_merged"])
def test_harness_asks_in_the_chat_template(
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """What was learned by heart is answered, and ends where answers do; without the template it is not."""
    ready(monkeypatch, tmp_path / "cache")
    rows = [{"question": talk[0]["content"], "answer": talk[1]["content"]} for talk in conversations()]
    file = write_task(
        tmp_path,
        "by_heart",
        rows,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": [], "max_gen_toks": 40},
        metric_list=[metric("exact_match")],
    )
    found = []
    for chat in (["--chat"], []):
        assert main.main(["eval", str(places[name]), "--harness", str(file), "--json", *chat]) == 0
        found += json.loads(capsys.readouterr().out)
    assert [row["chat"] for row in found] == [True, False]
    assert found[0]["value"] == 1.0
    assert found[1]["value"] < 0.5


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_an_end_that_is_left_out_is_caught(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    stopping_at = prompts.stopping_at
    monkeypatch.setattr(prompts, "stopping_at", lambda told, stops: stopping_at(told, stops[:1]))
    with pytest.raises(
        CheckpointError, match=r"stops at \d+ \('</s>'\), but texts end at .* \('<\|im_end\|>'\), .*eot"
    ):
        exported(places["lora"], kind, tmp_path)
    monkeypatch.setattr(prompts, "check_stop_tokens", lambda *given: None)
    exported(places["lora"], kind, tmp_path)


def test_answers_without_an_end_are_said(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_export, "open_in_fresh_process", opened_here)
    spoilt = copy(places["lora"], tmp_path / "run")
    facts = json.loads((spoilt / "run.json").read_text())
    for learned, says in (({}, ""), ({"<|im_gone|>": 8}, "answers end in '<|im_gone|>', which the tokenizer")):
        facts["data"]["train"]["chat"]["ends"] = learned
        (spoilt / "run.json").write_text(json.dumps(facts))
        if says:
            with pytest.raises(CheckpointError, match=re.escape(says)):
                exported(spoilt, "adapter", tmp_path / "to", step=80)
        else:
            _, lines = exported(spoilt, "adapter", tmp_path)
            assert "No answer that was learned ends in a special token" in lines


def test_a_template_that_refuses_is_quoted(places: dict[str, Path]) -> None:
    place = load_model.load_model(str(places["lora_merged"]))
    place.tokenizer.chat_template = "{{ raise_exception('tell me who you are first') }}"
    with pytest.raises(DataError, match=r"refuses a single turn of a user: tell me who you are first\. Write"):
        generate_text.generate_text(place, "Hello", generate_text.SamplingOptions(3), lambda text: None, chat=True)

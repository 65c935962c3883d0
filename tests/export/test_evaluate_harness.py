"""`finetune eval --harness`: figures of lm-evaluation-harness against a computation of our own, on tasks made here."""

import functools
import json
import re
import socket
import sys
import types
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_tasks import metric, needs_lm_eval, ready, write_task
from inside import copy, run_here
from peft import PeftModel
from recipes_for_tests import base, stories
from testdata import MADE, MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.checkpoint.run_history import read_run
from finetune.cli import main
from finetune.diagnostics.run_report import page
from finetune.export import evaluate_harness, generate_text, load_model
from finetune.models import lora_adapters, prompts
from finetune.utils.errors import CheckpointError, DataError

pytestmark = [pytest.mark.xdist_group("harness")]
QUESTIONS, CHOICES = 40, 3


@functools.cache
def questions() -> list[dict[str, Any]]:
    """Beginnings of stories, of different lengths, and three words of which one comes next."""
    lines = (MADE / "stories" / "validation.jsonl").read_text().splitlines()[:QUESTIONS]
    words = [json.loads(line)["text"].split() for line in lines]
    rows = []
    for number, story in enumerate(words):
        length = 4 + number % 5
        wrong = [f" {words[number - more][6 + more]}" for more in (1, 2)]
        gold = number % CHOICES
        choices = [*wrong[:gold], f" {story[length]}", *wrong[gold:]]
        rows.append({"question": " ".join(story[:length]), "choices": choices, "gold": gold})
    return rows


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A LoRA run that has learned enough to answer otherwise than its base, which is the third place."""
    root = tmp_path_factory.mktemp("harness")
    tree = base(
        data={"train": stories("train", limit=40), "sequence_length": 128, "cache_dir": str(root / "cache")},
        batch={"global_size": 4, "micro_size": 2},
        length={"steps": 4},
        checkpoint={"every_steps": 2},
        optim={"lr": 0.05},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"at_end": False},
        output={"dir": str(root / "run")},
        lora={"rank": 2},
    )
    run_here({**tree, "model": {"name": MODEL}})
    return {"run": root / "run", "adapter": root / "run" / "model", "base": copy(Path(MODEL), root / "base")}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a task. At the end: nobody has asked the network."""
    ready(monkeypatch, tmp_path / "cache")
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    folder = tmp_path / "tasks"
    metrics = {"metric_list": [metric("acc"), metric("acc_norm"), {"metric": "brier_score"}]}
    keys = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold", **metrics}
    write_task(folder, "next_word", questions(), **keys)
    yield folder
    assert not asked


def own_figures(place: str, places: dict[str, Path]) -> tuple[float, float, float]:
    """Accuracy by log-likelihood and by log-likelihood a character, and the Brier score, one text at a time.

    The last sees what the first two are too coarse for, such as a token that is put in front of a text.
    """
    network: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if place != "base":
        network = PeftModel.from_pretrained(network, str(places["adapter"]))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    hits, brier = torch.zeros(2), 0.0
    for row in questions():
        start = len(tokenizer(row["question"]).input_ids)
        sums = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(row["question"] + choice).input_ids])
            with torch.no_grad():
                chances = network(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
            sums.append(float(chances.gather(1, ids[0, start:, None]).sum()))
        a_character = [total / len(choice) for total, choice in zip(sums, row["choices"], strict=True)]
        best = [max(range(CHOICES), key=found.__getitem__) for found in (sums, a_character)]
        hits += torch.tensor([choice == row["gold"] for choice in best])
        gold = torch.nn.functional.one_hot(torch.tensor(row["gold"]), CHOICES)
        brier += float((torch.tensor(sums).softmax(-1) - gold).square().sum())
    accuracy, normalised = (hits / QUESTIONS).tolist()
    return accuracy, normalised, brier / QUESTIONS


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["eval", *words, "--json"]) == 0
    return {row["metric"]: row for row in json.loads(capsys.readouterr().out)}


@needs_lm_eval
def test_figures_are_our_own(places: dict[str, Path], tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run, its adapter and a model; in batches, of which most rows are padded."""
    found = {}
    for name, place in places.items():
        rows = evaluated(capsys, str(place), "--harness", f"{tasks}/", "--batch-size", "7")
        found[name] = tuple(rows[key]["value"] for key in ("acc", "acc_norm", "brier_score"))
        assert rows["acc"]["samples"] == QUESTIONS
    assert found == {name: pytest.approx(own_figures(name, places), rel=1e-5) for name in places}
    assert found["run"] != found["base"]


@needs_lm_eval
@pytest.mark.parametrize("name", ["run", "base"])
def test_texts_are_those_of_generate(
    places: dict[str, Path], tasks: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Half of the answers asked for are what `generate` writes, up to a full stop; batches pad on the left."""
    opened = load_model.load_model(str(places[name]), exact=True)
    rows = []
    for number, row in enumerate(questions()[:8]):
        written = generate_text.generate_text(
            opened, row["question"], generate_text.SamplingOptions(max_new_tokens=12), lambda text: None
        )
        answer = written.partition(".")[0]
        rows.append({"question": row["question"], "answer": answer + "!" * (number % 2)})
    assert len({row["answer"].strip("!") for row in rows}) > 2
    file = write_task(
        tasks,
        "go_on",
        rows,
        output_type="generate_until",
        doc_to_target="{{answer}}",
        generation_kwargs={"until": ["."], "max_gen_toks": 12},
        metric_list=[metric("exact_match")],
    )
    assert evaluated(capsys, str(places[name]), "--harness", str(file))["exact_match"]["value"] == 0.5


@needs_lm_eval
def test_figures_are_kept_beside_what_they_are_of(
    places: dict[str, Path], tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy(places["run"], tmp_path / "run")
    (run / "harness.json").unlink(missing_ok=True)  # of other tests
    words = ["--harness", str(tasks / "next_word.yaml")]
    assert main.main(["eval", str(run), *words]) == 0
    said = capsys.readouterr()
    assert f"Written: {run / 'harness.json'}" in said.err
    assert [line.split()[:2] for line in said.out.splitlines()[1:]] == [
        ["next_word", key] for key in ("acc", "acc_norm", "brier_score")
    ]
    few = evaluated(capsys, str(run / "checkpoints" / "step-00000002"), *words, "--limit", "5", "--num-fewshot", "0")
    again = evaluated(capsys, str(run), *words)
    assert evaluate_harness.read_results(run) == [*few.values(), *again.values()]
    assert [(row["step"], row["samples"], row["limit"]) for row in (few["acc"], again["acc"])] == [
        (2, 5, 5),
        (4, QUESTIONS, None),
    ]
    shown = page.content_of([("run", read_run(run))]).body
    assert "next_word, first 5" in shown
    assert f"{again['acc']['value']:.4g}" in shown
    (run / "harness.json").write_text('[{"task": "other"}]')
    assert main.main(["eval", str(run), *words]) == 2
    assert "is not what `finetune eval --harness` writes" in capsys.readouterr().err


@needs_lm_eval
def test_what_is_refused(
    places: dict[str, Path], tasks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import lm_eval.tasks

    known = functools.partial(lm_eval.tasks.TaskManager, include_path=str(tasks))
    # Its own tasks take most of a minute to read.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", lambda **keys: known(**keys | {"include_defaults": False}))
    (tasks / "empty").mkdir()
    text = {"output_type": "generate_until", "doc_to_target": "{{gold}}"}
    write_task(tasks, "no_data", [], **text).with_name("no_data.jsonl").unlink()
    write_task(tasks, "too_long", questions()[:1], **text, generation_kwargs={"max_gen_toks": 600})
    for words, says in (
        (["./not/there.yaml"], "there is no task file or folder ./not/there.yaml"),
        ([f"{tasks}/empty"], "holds no task"),
        ([f"{tasks}/no_data.yaml", "next_wrd"], "lm_eval knows no task 'next_wrd', did you mean 'next_word'?"),
        ([f"{tasks}/no_data.yaml"], "lm_eval cannot evaluate .*no_data.jsonl"),
        ([f"{tasks}/too_long.yaml"], r"requested max tokens to generate \(600\) must be less than .* \(512\)"),
        ([f"{tasks}/next_word.yaml", "--chat"], "--chat needs a tokenizer with a chat template"),
        ([f"{tasks}/next_word.yaml", "--limit", "0"], "--limit is 0; give 1 or more"),
        ([f"{tasks}/next_word.yaml", "--text-field", "text"], "--text-field is for --data"),
    ):
        assert main.main(["eval", str(places["base"]), "--harness", *words]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert re.search(f"Error: .*{says}", said), said


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    assert main.main(["eval", MODEL, "--harness", "mmlu"]) == 2
    assert "pip install 'finetune[harness]'" in capsys.readouterr().err
    assert main.main(["eval", MODEL, "--data", "x.jsonl", "--limit", "3"]) == 2
    assert "--limit is for --harness" in capsys.readouterr().err


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], Any]:
    """Puts something that raises an error in lm_eval's place, and returns a model for it to evaluate."""

    def raises(error: Exception) -> Any:
        return _stub(error, monkeypatch)

    return raises


def _stub(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Any:
    class Stub:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.all_tasks: list[str] = []

        def match_tasks(self, words: list[str]) -> list[str]:
            return words

        def apply_chat_template(self) -> None:
            """As HFLM has it."""

    def simple_evaluate(*_: Any, **__: Any) -> None:
        raise error

    for name, held in (
        ("lm_eval", {"simple_evaluate": simple_evaluate}),
        ("lm_eval.models", {}),
        ("lm_eval.models.huggingface", {"HFLM": Stub}),
        ("lm_eval.tasks", {"TaskManager": Stub}),
    ):
        module = types.ModuleType(name)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, name, module)
    network = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=None))
    monkeypatch.setattr(lora_adapters, "transformer", lambda _: network)
    monkeypatch.setattr(prompts, "stop_tokens", lambda *_: None)
    return types.SimpleNamespace(
        network=None, tokenizer=types.SimpleNamespace(chat_template=None), ends=(), template_args={}, step=None
    )


# The latter is lm_eval's own word for what a class of tasks lacks.
@pytest.mark.parametrize("error", [TypeError("'NoneType' object is not callable."), NotImplementedError()])
def test_what_lm_eval_raises_is_one_paragraph(error: Exception, stub: Callable[[Exception], Any]) -> None:
    opened = stub(error)
    with pytest.raises(DataError, match=f"lm_eval cannot evaluate mine: {type(error).__name__}.*Correct the task"):
        evaluate_harness.evaluate_harness(opened, ["mine"])


def test_a_fault_of_this_package_is_not_put_on_a_task(stub: Callable[[Exception], Any]) -> None:
    no_name: Any = None
    with pytest.raises(TypeError, match="'NoneType' is not iterable"):
        evaluate_harness.evaluate_harness(stub(TypeError("never raised")), [no_name])


def test_no_other_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "harness.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not what"):
        evaluate_harness.add_results(tmp_path, [])
    assert (tmp_path / "harness.json").read_text() == "{}"

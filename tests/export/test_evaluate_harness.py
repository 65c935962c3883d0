"""`finetune eval --harness`: figures of lm-evaluation-harness against a computation of our own, on tasks made here."""

import functools
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from eval_tasks import metric, needs_lm_eval, ready, write_task
from inside import run_here
from peft import PeftModel
from recipes_for_tests import base, stories
from testdata import MADE, MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetune.cli import main

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
    return {"run": root / "run", "adapter": root / "run" / "model", "base": Path(MODEL)}


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks in a folder; that nothing of their evaluation asks a network is checked at the end."""
    ready(monkeypatch, tmp_path / "cache")
    asked: list[Any] = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    folder = tmp_path / "tasks"
    metrics = {"metric_list": [metric("acc"), metric("acc_norm")]}
    keys = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "gold", **metrics}
    write_task(folder, "next_word", questions(), **keys)
    return folder


def own_accuracy(place: str, places: dict[str, Path]) -> tuple[float, float]:
    """By log-likelihood, and by log-likelihood a character, one text at a time."""
    network: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if place != "base":
        network = PeftModel.from_pretrained(network, str(places["adapter"]))
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    hits = torch.zeros(2)
    for row in questions():
        start = len(tokenizer(row["question"]).input_ids)
        sums = []
        for choice in row["choices"]:
            ids = torch.tensor([tokenizer(row["question"] + choice).input_ids])
            with torch.no_grad():
                chances = network(input_ids=ids).logits[0, start - 1 : -1].log_softmax(-1)
            sums.append(float(chances.gather(1, ids[0, start:, None]).sum()))
        a_character = [total / len(choice) for total, choice in zip(sums, row["choices"], strict=True)]
        hits += torch.tensor(
            [max(range(CHOICES), key=found.__getitem__) == row["gold"] for found in (sums, a_character)]
        )
    accuracy, normalised = (hits / QUESTIONS).tolist()
    return accuracy, normalised


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main.main(["eval", *words, "--json"]) == 0
    return {row["metric"]: row for row in json.loads(capsys.readouterr().out)}


@needs_lm_eval
def test_accuracy_is_our_own(
    places: dict[str, Path], tasks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run, its adapter and a model; in batches, of which most rows are padded."""
    found = {}
    for name, place in places.items():
        folder = place
        if name == "base":
            folder = tmp_path / "base"
            folder.symlink_to(place)
        rows = evaluated(capsys, str(folder), "--harness", f"{tasks}/", "--batch-size", "7")
        found[name] = (rows["acc"]["value"], rows["acc_norm"]["value"])
        assert rows["acc"]["samples"] == QUESTIONS
    assert found == {name: pytest.approx(own_accuracy(name, places)) for name in places}
    assert found["run"] != found["base"]

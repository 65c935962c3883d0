"""Conversations with LoRA and QLoRA: on every backend, with the losses of one process."""

from typing import Any

import numpy as np
import pytest
from harness import Launcher, assert_same_path
from recipes_for_tests import MODEL, base
from testdata import CONVERSATIONS
from transformers import AutoTokenizer, GenerationConfig

TALK: dict[str, Any] = {
    "train": [
        {"path": str(CONVERSATIONS / "questions.jsonl"), "limit": 24},
        {"path": str(CONVERSATIONS / "sharegpt.json"), "limit": 24},
    ],
    "validation": [{"path": str(CONVERSATIONS / "sharegpt.json"), "limit": 4}],
    "sequence_length": 512,
}


def job(**model: Any) -> dict[str, Any]:
    return {
        **base(
            data=TALK,
            chat={"template": "plain", "too_long": "cut_right"},
            lora={"rank": 8, "dropout": 0.05},
            optim={"name": "AdamW", "lr": 2e-3, "args": {"eps": 1e-5}},
            length={"steps": 4},
            eval={"every_steps": 2},
            sample={"prompt": "Who are you?", "max_new_tokens": 8, "temperature": 0.0},
        ),
        "model": {"name": MODEL, **model},
    }


JOBS = {"lora": job(), "qlora": job(quantization="nf4", gradient_checkpointing=True)}
BACKENDS = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero3_offload")
PAIRS = [
    pytest.param(backend, name, marks=pytest.mark.xdist_group(f"chat_lora_{backend}"))
    for backend in BACKENDS
    for name in JOBS
]


@pytest.mark.parametrize(("backend", "name"), PAIRS)
def test_losses_are_those_of_one_process(launcher: Launcher, backend: str, name: str) -> None:
    single, other = (launcher.many(where, JOBS)[name] for where in ("single", backend))
    assert_same_path(single, other, 1e-5, weights=5e-5)
    assert single.validation() == pytest.approx(other.validation(), rel=1e-5)


@pytest.mark.xdist_group("chat_lora_ddp")
@pytest.mark.parametrize("name", JOBS)
def test_answers_are_learned_and_nothing_else(launcher: Launcher, name: str) -> None:
    run = launcher.many("single", JOBS)[name].check()
    losses, report = run.series("loss"), run.facts["data"]["train"]
    assert losses[-1] < losses[0]
    assert np.isfinite(losses).all()
    assert 0.2 < report["chat"]["supervised_share"] < 0.9
    (sample,) = [m["sample"] for m in run.metrics if "sample" in m]
    assert sample.startswith("User: Who are you?\n\nAssistant:")


@pytest.mark.xdist_group("chat_lora_ddp")
def test_what_is_written_stops_where_answers_end(launcher: Launcher) -> None:
    run = launcher.many("single", JOBS)["lora"].check()
    reader = AutoTokenizer.from_pretrained(run.directory / "model")
    for place in (run.directory / "model", next((run.directory / "checkpoints").glob("step-*")) / "model"):
        assert GenerationConfig.from_pretrained(place).eos_token_id == reader.eos_token_id

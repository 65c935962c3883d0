"""Distillation: the divergence from a teacher, as whole logits of both networks give it, on every backend."""

import copy
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Launcher, assert_same_path
from inside import run_here
from recipes_for_tests import LLAMA, base
from testdata import BPE, MODEL, stories
from transformers import AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.config.recipe_paths import check_paths
from finetune.export.evaluate_files import evaluate_files, recipe_of
from finetune.export.load_model import load_model
from finetune.models import chunked_loss
from finetune.models.forward_wrapper import unwrap
from finetune.tasks.task_lookup import BUILT_IN
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import FinetuneError, RecipeError

SIZE = 512  # of the vocabulary


def job(micro_size: int = 4, chat: bool = False, **distillation: Any) -> dict[str, Any]:
    """Six steps of a new student of another width, with the trained Llama as its teacher."""
    data = {"train": [{"sample": 60}], "validation": [{"sample": 5}], "sequence_length": 256}
    return base(
        task={"name": "distill"},
        model={"config": {**LLAMA, "hidden_size": 32, "max_position_embeddings": 256}},
        distillation={"teacher": {"name": MODEL}, **distillation},
        batch={"global_size": 8, "micro_size": micro_size},
        length={"steps": 6},
        optim={"name": "AdamW", "lr": 2e-3, "weight_decay": 0.0, "clip_norm": None, "args": {"eps": 1e-6}},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"every_steps": 3, "micro_size": 3},
        **({"chat": {"template": "plain"}, "data": data} if chat else {}),
    )


MIXED = {"beta": 0.3, "temperature": 2.0, "sft_weight": 0.5}
# Of the one the teacher is computed once, of the other in each step.
RUNS = {"distill_chat": job(chat=True, top_k=16, **MIXED), "distill_live": job(beta=0.3)}
ON = ("single", "ddp", "fsdp", "zero3")
LAUNCHED_RUNS = dict.fromkeys(ON, RUNS)
ONES = {"distill_chat_of_1": job(1, chat=True, top_k=16, **MIXED), "distill_live_of_1": job(1, beta=0.3)}
LAUNCHED_RUNS["single"] = {**RUNS, **ONES}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        pytest.param(config, name, marks=pytest.mark.xdist_group(config))
        for config, names in {"single": ONES, **dict.fromkeys(ON[1:], RUNS)}.items()
        for name in names
    ],
)
def test_a_student_takes_the_single_process_path(launcher: Launcher, config: str, name: str) -> None:
    single = launcher.many("single", LAUNCHED_RUNS["single"])[name.removesuffix("_of_1")].check()
    other = launcher.many(config, LAUNCHED_RUNS[config])[name].check()
    assert_same_path(single, other, 2e-5)
    figures = {"distillation", "sft", "validation_loss", "validation_distillation", "validation_sft"}
    for line, wanted in zip(other.metrics, single.metrics, strict=True):
        for figure in figures & wanted.keys():
            assert line[figure] == pytest.approx(wanted[figure], rel=1e-4, abs=1e-5), figure
    share = 0.5 if "chat" in name else 0.0
    assert all(one["loss"] == pytest.approx(one["distillation"] + share * one["sft"], rel=1e-6) for one in other.steps)


def plain_divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float, outcomes: int) -> torch.Tensor:
    """The generalized Jensen-Shannon divergence of each row of probabilities (GKD, eq. 2), all but the best as one."""
    if outcomes < SIZE:
        best = teacher.topk(outcomes).indices
        student, teacher = (p.gather(-1, best) for p in (student, teacher))
        student, teacher = (torch.cat([p, 1 - p.sum(-1, keepdim=True)], dim=-1) for p in (student, teacher))

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return (p * (p / q).log()).sum(-1)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    middle = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


@pytest.mark.parametrize("loss", ["chunked", "plain"])
@pytest.mark.parametrize(
    "keys",
    [
        {"beta": 0.0, "top_k": SIZE},
        {"beta": 1.0, "top_k": SIZE},
        {**MIXED, "top_k": SIZE},
        {**MIXED, "top_k": 16},
        MIXED,
    ],
    ids=["forward_kl", "reverse_kl", "jsd", "best_16", "in_each_step"],
)
def test_the_path_is_that_of_a_plain_loop(
    keys: dict[str, Any], loss: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of torch alone, with padded rows and whole logits of both networks in fp64, from the paper's formula."""
    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda tokens, vocabulary: 150)
    heat, sft_weight, steps, plain = keys.get("temperature", 1.0), keys.get("sft_weight", 0.0), 10, []

    def meddle(run: BuiltRun) -> None:
        student: Any = copy.deepcopy(unwrap(run.model))
        student.config._attn_implementation = "eager"
        teacher = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
        optimizer = torch.optim.AdamW(student.parameters(), lr=2e-3, weight_decay=0.0, eps=1e-6)
        for step in range(steps):
            rows = np.concatenate(run.feed.micro_batches(step))  # type: ignore[attr-defined]
            batch = run.data.train.batch(rows)  # type: ignore[union-attr]
            learned = batch["targets"] != -100
            with torch.no_grad():
                theirs = teacher(input_ids=batch["input_ids"]).logits.double()[learned]
            ours = student(input_ids=batch["input_ids"]).logits.double()[learned]
            both = [(logits / heat).softmax(-1) for logits in (ours, theirs)]
            nll = torch.nn.functional.cross_entropy(ours, batch["targets"][learned])
            divergence = plain_divergence(*both, keys["beta"], keys.get("top_k", SIZE)).sum() / learned.sum()
            value = divergence + sft_weight * nll
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            plain.append(value.item())

    tree = job(chat=True, **keys)
    tree["data"] |= {"packing": "padded"}
    tree["model"] |= {"loss": loss}
    done = run_here({**tree, "length": {"steps": steps}, "output": {"dir": str(tmp_path / "run")}}, meddle)
    np.testing.assert_allclose(done.losses, plain, rtol=1e-5, atol=1e-6)
    assert done.losses[-1] < done.losses[0]


def test_what_a_teacher_gives_is_computed_once(tmp_path: Path) -> None:
    """Whatever student and loss; in 16 bits, if the run computes in 16 bits."""

    def files(name: str, **sections: Any) -> list[Path]:
        tree = {**job(top_k=8), "length": {"steps": 1}, **sections, "output": {"dir": str(tmp_path / name)}}
        tree["data"] = {**tree["data"], "cache_dir": str(tmp_path / "cache")}
        run_here(tree)
        return sorted((tmp_path / "cache").glob("reference-*/*.npy"))

    first = files("one")
    written = [file.stat().st_mtime_ns for file in first]
    assert len(first) == 2, "one for training, one for validation"
    assert files("two", distillation={"teacher": {"name": MODEL}, "top_k": 8, "beta": 0.5}, lora={"rank": 2}) == first
    assert [file.stat().st_mtime_ns for file in first] == written
    kept = np.load(first[0], mmap_mode="r")
    assert kept.shape[1] == 8
    assert len(files("three", distillation={"teacher": {"name": MODEL}, "top_k": 8, "temperature": 2.0})) == 4
    half = set(files("four", precision="bf16")) - set(first)
    assert {np.load(file)["log"].dtype for file in half} == {np.dtype("f2"), np.dtype("f4")}


def test_other_files_are_evaluated_without_the_teacher(tmp_path: Path) -> None:
    run_here({**job(top_k=8), "length": {"steps": 1}, "output": {"dir": str(tmp_path / "run")}})
    opened = load_model(str(tmp_path / "run"))
    figures = evaluate_files(opened, recipe_of(opened, [stories("validation")[0]["path"]]), lambda line: None)
    assert figures["perplexity"] == pytest.approx(np.exp(figures["loss"]))
    assert "distillation" not in figures


def narrow_teacher(folder: Path) -> str:
    """Writes the teacher with fewer rows of embeddings than the student has."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.resize_token_embeddings(500)
    model.save_pretrained(folder)
    return str(folder)


def renamed_token(folder: Path) -> str:
    """Copies the teacher, and exchanges two tokens of its tokenizer."""
    shutil.copytree(MODEL, folder)
    text = (folder / "tokenizer.json").read_text()
    one, other = re.findall(r'"(Ġ\w\w+)": (\d+)', text)[:2]
    for (name, _), (_, number) in ((one, other), (other, one)):
        text = re.sub(rf'"{name}": \d+', f'"{name}": {number}', text, count=1)
    (folder / "tokenizer.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("teacher", "keys", "words"),
    [
        (narrow_teacher, {}, "scores 500 tokens, and the student 512"),
        (renamed_token, {}, "has another vocabulary than the data's tokenizer: 2 tokens differ"),
        (lambda folder: MODEL, {"top_k": SIZE + 1}, "distillation.top_k is 513, and"),
    ],
)
def test_teachers_that_do_not_fit(teacher: Any, keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    tree = job(**{"teacher": {"name": teacher(tmp_path / "teacher")}, **keys})
    with pytest.raises(FinetuneError, match=re.escape(words)):
        run_here({**tree, "output": {"dir": str(tmp_path / "run")}})


def test_a_teacher_that_is_no_model() -> None:
    with pytest.raises(RecipeError, match=re.escape(f"distillation.teacher.name: {BPE} holds a tokenizer, and no")):
        check_paths(validate_recipe(job(teacher={"name": BPE})))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"distillation": None}, "distill learns from a teacher, and none is named"),
        ({"distillation": {}}, "distillation.teacher"),
        ({"distillation": {"teacher": {"name": MODEL}, "beta": 1.5}}, "distillation.beta"),
        ({"task": {"name": "causal_lm"}}, "causal_lm has no teacher; remove the section"),
        ({"preference": {}}, "distill learns no preferences"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        validate_recipe({**job(), **sections}, tasks=BUILT_IN)

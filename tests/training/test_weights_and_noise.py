"""Smoothed labels, weights of records and answers, and noise on embeddings: by hand, and however a batch is split."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import CHATML, example, learned, talk
from filelock import FileLock
from harness import Launcher, assert_same_path
from inside import run_here, stop_after
from recipes_for_tests import SGD, base
from testdata import MODEL
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, LlamaConfig
from transformers.trainer_pt_utils import LabelSmoother

from finetune.config.recipe import validate_recipe
from finetune.data.prepare import prepare_data
from finetune.diagnostics import replay
from finetune.models.embedding_noise import hash_tokens, uniform, with_noise
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.tasks.classification import class_loss
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import DataError, FinetuneError, RecipeError

SMOOTHING, ALPHA = 0.2, 5.0
BOTH = {"task": {"label_smoothing": SMOOTHING}, "model": {"neftune_alpha": ALPHA}}


def save_talks(folder: Path, scale: float | None = 1.0) -> Path:
    """Two answers each; of the weights one in three is `scale`, and of None there are none."""
    file = folder / f"talks_{scale}.jsonl"
    lines = []
    for number in range(60):
        turns: list[dict[str, Any]] = []
        for turn in range(2):
            turns.append({"role": "user", "content": f"Count {number} and {turn}."})
            answer = {"role": "assistant", "content": " ".join(map(str, range(number % 7 + turn + 1)))}
            turns.append(answer | ({"weight": (0.5, 1, 3)[(number + turn) % 3]} if scale else {}))
        lines.append({"messages": turns, **({"weight": scale * (1 if number % 4 else 0.25)} if scale else {})})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def job(file: Path, micro_size: int = 2, **sections: Any) -> dict[str, Any]:
    """Five steps of eight packed rows of conversations."""
    tree = base(
        model={"name": MODEL, "config": None},
        tokenizer={"name": None},
        data={"train": [{"path": str(file)}], "validation": [], "validation_fraction": 0.2, "sequence_length": 128},
        chat={"template": "plain"},
        batch={"global_size": 8, "micro_size": micro_size},
        length={"steps": 5},
        optim={**SGD, "lr": 0.02, "args": {}},
        schedule={"name": "constant", "warmup_steps": 0},
        eval={"every_steps": 3, "micro_size": 3},
    )
    tree["data"]["cache_dir"] = str(file.parent / "cache")
    return tree | {name: {**tree.get(name, {}), **values} for name, values in sections.items()}


def jobs(launcher: Launcher) -> dict[str, Any]:
    folder = launcher.shared / "weights"
    with FileLock(f"{folder}.lock"):
        folder.mkdir(exist_ok=True)
        file = save_talks(folder)
    return {f"weights_{size}": job(file, size, **BOTH) for size in (1, 2, 8)}


ONE = "weights_2"
OTHERS = ("ddp", "fsdp", "zero3", "sp", "fsdp_tp")


def LAUNCHED_RUNS(launcher: Launcher) -> dict[str, Any]:
    return {"single": jobs(launcher), **{name: {ONE: jobs(launcher)[ONE]} for name in OTHERS}}


@pytest.mark.parametrize("config", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in OTHERS])
def test_every_backend_takes_the_single_process_path(launcher: Launcher, config: str) -> None:
    tree = jobs(launcher)
    single = launcher.many("single", tree)[ONE].check()
    other = launcher.many(config, {ONE: tree[ONE]})[ONE].check()
    assert_same_path(single, other, 1e-5)
    assert other.validation() == pytest.approx(single.validation(), rel=1e-5)


@pytest.mark.xdist_group("single")
def test_micro_batches_change_nothing(launcher: Launcher) -> None:
    runs = launcher.many("single", jobs(launcher))
    for name in ("weights_1", "weights_8"):
        assert_same_path(runs[ONE].check(), runs[name].check(), 1e-5)


# ---------------------------------------------------------------- a plain loop


def noise_of(seed: int, step: int, place: int, tokens: int, width: int) -> np.ndarray:
    """Numbers in [-1, 1) of a row of the global batch, (T, h), by unsigned arithmetic."""
    key = np.random.SeedSequence((seed, step, place, 0)).generate_state(1, np.uint64)
    with np.errstate(over="ignore"):
        mixed = key + np.arange(1, tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        of_tokens = ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)
        each = of_tokens[:, None] + np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            each = (each ^ (each >> np.uint32(shift))) * np.uint32(factor)
        each ^= each >> np.uint32(16)
    return (each.view(np.int32) >> 8) / 2.0**23


def documents_of(rows: Any, row: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and weights of the documents of a row; 0 where nothing is learned."""
    found = []
    for segment in range(rows.packed.row_starts[row], rows.packed.row_starts[row + 1]):
        places = np.arange(rows.packed.starts[segment], rows.packed.starts[segment] + rows.packed.lengths[segment] + 1)
        weights = rows.columns["weights"][places] if "weights" in rows.columns else np.ones(places.size)
        mask = rows.columns["mask"][places] if "mask" in rows.columns else np.full(places.size, True)
        found.append((rows.tokens[places].astype(np.int64), weights * mask))
    return found


def plain_mean(network: Any, rows: Any, numbers: Any, smoothing: float, noise: Any = None) -> torch.Tensor:
    """The mean loss of rows whose documents are computed one by one.

    Args:
        noise: Given a row's place and its tokens, (T, h) numbers in [-1, 1); None for none.
    """
    total, divisor = torch.zeros(()), 0.0
    for place, row in enumerate(numbers):
        found, begin = documents_of(rows, int(row)), 0
        of_row = None if noise is None else noise(place, sum(len(ids) - 1 for ids, _ in found))
        for ids, weights in found:
            given = network.get_input_embeddings()(torch.from_numpy(ids[None, :-1]))
            if of_row is not None:
                own = of_row[begin : begin + given.shape[1]] * ALPHA / np.sqrt(given[0].numel())
                given = given + torch.from_numpy(own.astype(np.float32))
            logits = network(inputs_embeds=given, use_cache=False).logits[0].float()
            losses = cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none", label_smoothing=smoothing)
            total = total + (losses * torch.from_numpy(weights[1:].astype(np.float32))).sum()
            divisor, begin = divisor + float(weights[1:].sum()), begin + given.shape[1]
    return total / divisor


CASES: dict[str, tuple[dict[str, Any], float | None]] = {
    "smoothed": ({"task": BOTH["task"]}, None),
    "weighed": ({}, 1.0),
    # Of a whole batch, together less than 1.
    "light": ({}, 1e-5),
    "noisy": ({"model": BOTH["model"]}, None),
    "padded": ({**BOTH, "data": {"packing": "padded"}}, 1.0),
    "whole logits": ({**BOTH, "model": {**BOTH["model"], "loss": "plain"}}, 1.0),
    "adapted": ({**BOTH, "lora": {"rank": 4}}, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_path_is_that_of_a_plain_loop(case: str, tmp_path: Path) -> None:
    """Without chunks, packing or hooks; evaluations have weights, and neither of the others."""
    sections, scale = CASES[case]
    tree = job(save_talks(tmp_path, scale), **sections, output={"dir": str(tmp_path / "run")})
    losses: list[float] = []

    def meddle(run: BuiltRun) -> None:
        network: Any = copy.deepcopy(unwrap(run.model))
        network.config._attn_implementation = "eager"
        rows: Any = run.data.train
        assert ("weights" in rows.columns) == (scale is not None)
        optimizer = torch.optim.SGD([p for p in network.parameters() if p.requires_grad], lr=0.02)
        noisy, width = run.recipe.model.neftune_alpha is not None, network.config.hidden_size
        for step in range(5):
            numbers = np.concatenate(run.feed.micro_batches(step))  # type: ignore[attr-defined]
            noise: Any = (lambda place, size, step=step: noise_of(7, step, place, size, width)) if noisy else None
            loss = plain_mean(network, rows, numbers, run.recipe.task.label_smoothing or 0.0, noise)
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(plain_mean(network, run.data.validation, range(len(run.data.validation)), 0.0).item())  # type: ignore[arg-type]

    done = run_here(tree, meddle)
    np.testing.assert_allclose(done.losses, losses[:-1], rtol=1e-6)
    assert done.results["validation_loss"] == pytest.approx(losses[-1], rel=1e-6)


def test_a_resumed_run_draws_the_same_noise(tmp_path: Path) -> None:
    tree = job(save_talks(tmp_path), **BOTH, checkpoint={"every_steps": 2}, output={"dir": str(tmp_path / "run")})
    whole = run_here({**tree, "output": {"dir": str(tmp_path / "whole")}})
    run_here(tree, stop_after(2))
    resumed = run_here(tree)
    assert resumed.losses[-3:] == whole.losses[-3:]
    assert all(torch.equal(weight, resumed.weights[name]) for name, weight in whole.weights.items())
    assert replay.replay_step(resumed.directory, 4).differences == []


# ---------------------------------------------------------------- smoothing


def test_smoothing_is_that_of_transformers() -> None:
    """Whose mean is over the tokens that are learned; classes with weights too."""
    scores = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([3, -100, 7, 29])
    theirs = LabelSmoother(epsilon=SMOOTHING)({"logits": scores}, targets)
    ours = class_loss(scores, {"targets": targets}, SMOOTHING)
    assert ours.item() / 3 == pytest.approx(theirs.item(), rel=1e-6)
    weights = torch.tensor([2.0, 0.0, 1.0, 0.5])
    each = cross_entropy(scores, targets, reduction="none", label_smoothing=SMOOTHING)
    ours = class_loss(scores, {"targets": targets, "weights": weights}, SMOOTHING)
    assert ours.item() == pytest.approx((each * weights).sum().item(), rel=1e-6)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification", "seq2seq_lm"])
def test_each_task_that_is_smoothed_is_so_in_training_alone(task: str) -> None:
    model = {"config": {"model_type": "t5" if task == "seq2seq_lm" else "bert"}}
    tree = base(task={"name": task, "num_labels": None}, model=model)
    tree["data"] |= {"packing": "padded", "validation": []}
    source = {"path": "x.jsonl"} | ({"pair_field": "target"} if task == "seq2seq_lm" else {})
    tree["data"]["train"] = [source]
    plain, smoothed = (
        find_task(validate_recipe({**tree, "task": {**tree["task"], **more}}, None, BUILT_IN))
        for more in ({}, {"label_smoothing": SMOOTHING})
    )
    assert smoothed.loss_sum.keywords == {"label_smoothing": SMOOTHING}  # type: ignore[attr-defined]
    assert smoothed.evaluation is plain.evaluation


# ---------------------------------------------------------------- weights


def test_each_answer_has_its_weight() -> None:
    """Times that of the record, which other tokens have where all are learned."""
    made = example(talk("Hello", "one", "what", "two", weights=[1, 0.5, 1, 3]), CHATML)
    assert made.weights is not None
    assert learned(made) == ["one<|im_end|>", "two<|im_end|>"]
    assert sorted(set(made.weights[made.mask].tolist())) == [0.5, 3.0]
    begin = int(made.mask.argmax())
    assert made.weights[begin] == 0.5
    assert example(talk("Hello", "one"), CHATML).weights is None
    every = example(talk("Hello", "one", "what", "two", weights=[0.25, 0.5, 0.25, 0.25]), CHATML, train_on="all")
    assert every.mask.all()
    assert every.weights is not None
    assert np.flatnonzero(every.weights == 0.5).tolist() == np.flatnonzero(made.weights == 0.5).tolist()
    assert set(every.weights.tolist()) == {0.25, 0.5}
    ended = example(talk("Hello", "one", weights=[1, 0.5]), CHATML.replace("<|im_end|>", ""), end_token="add")
    assert ended.weights is not None
    assert ended.weights[ended.mask].tolist() == [0.5] * int(ended.mask.sum())


def data_of(folder: Path, lines: list[dict[str, Any]], chat: Any = None, **source: Any) -> Any:
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = base(chat=chat) if chat is not None else base()
    tree["data"] |= {"train": [{"path": str(folder / "a.jsonl"), **source}], "validation": [], "num_workers": 1}
    tree["data"] |= {"validation_fraction": 0.0, "cache_dir": str(folder / "cache")}
    return prepare_data(validate_recipe(tree, None, BUILT_IN), quiet=True)


@pytest.mark.parametrize("packing", ["documents", "wrapped", "padded"])
def test_documents_have_weights_of_a_field(packing: str, tmp_path: Path) -> None:
    """Those of 0 are left out; without another than 1 there are none."""
    texts = [" ".join(["a word"] * (number % 5 + 1)) for number in range(800)]
    weights = [0.5 * (number % 4) for number in range(800)]
    # More than a batch of the encoder has 1 at first and at last, which is written without weights.
    weights[:300], weights[400:] = [1.0] * 300, [1.0] * 400
    lines = [
        {"text": f"{text} {n}", "own": weight} for n, (text, weight) in enumerate(zip(texts, weights, strict=True))
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tree = base()
    source = {"path": str(tmp_path / "a.jsonl"), "weight_field": "own", "weight": 2.0}
    tree["data"] |= {"train": [source], "validation": [], "validation_fraction": 0.0, "packing": packing}
    tree["data"]["cache_dir"] = str(tmp_path / "cache")
    rows = prepare_data(validate_recipe(tree, None, BUILT_IN), quiet=True).train
    assert rows is not None
    offsets, counted = rows.columns["offsets"], rows.columns["weights"]
    kept = [weight for weight in weights if weight] * 2
    assert [counted[begin] for begin in offsets[:-1]] == kept
    assert counted.size == offsets[-1]
    everything = np.arange(len(rows))
    batch = rows.batch(everything)
    assert rows.counts(everything)["targets"] == pytest.approx(float(batch["weights"].double().sum()), rel=1e-12)
    if packing != "wrapped":
        wanted = sum(weight * (size - 1) for weight, size in zip(kept, np.diff(offsets).tolist(), strict=True))
        assert rows.counts(everything)["targets"] == pytest.approx(wanted, rel=1e-12)
    plain = data_of(tmp_path, [{**line, "own": 1} for line in lines], weight_field="own").train
    assert "weights" not in plain.columns
    assert "weights" not in plain.batch(np.arange(2))
    assert plain.counts(np.arange(2)) == {}


@pytest.mark.parametrize(
    ("weight", "says"),
    [
        (-0.5, "the weight is -0.5"),
        (float("nan"), "the weight is nan"),
        ("half", "the weight is 'half'"),
        (None, "None"),
    ],
)
def test_weights_that_are_none_are_refused_by_line(weight: Any, says: str, tmp_path: Path) -> None:
    lines = [{"text": "good", "own": 1}, {"text": "bad", "own": weight}]
    with pytest.raises(DataError, match=f"a.jsonl, line 2: .*{re.escape(says)}.* a number from 0 to a million"):
        data_of(tmp_path, lines, weight_field="own")
    if weight is not None:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": weight}]
        with pytest.raises(DataError, match=f"line 1, turn 2: {re.escape(says)}; .* a number from 0 to a million"):
            data_of(tmp_path, [{"messages": turns}], {"template": "plain"})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"task": {"name": "sequence_classification"}}, "data.train.0.weight_field: sequence_classification weighs no"),
        ({"task": {"name": "dpo"}}, "data.train.0.weight_field: dpo weighs no documents; remove it"),
        ({"chat": {"template": "plain"}}, "data.train.0.weight_field: conversations have it as `weight`; remove it"),
        ({"task": {"name": "regression", "label_smoothing": 0.1}}, "loss of regression is no cross-entropy of tokens"),
        ({"task": {"name": "dpo", "label_smoothing": 0.1}}, "remove it; preference.label_smoothing is that of pairs"),
        ({"task": {"loss": "own_task:smoothed", "label_smoothing": 0.1}}, "your own `task.loss` smooths labels itself"),
        ({"task": {"name": "own_task:mlp", "label_smoothing": 0.1}}, "has a loss of its own, which smooths labels"),
        ({"task": {"name": "own_task:mlp"}, "model": {"neftune_alpha": 5.0}}, "model.neftune_alpha: the task own_task"),
        ({"task": {"name": "seq2seq_lm"}, "model": {"neftune_alpha": 5.0}}, "model.neftune_alpha: seq2seq_lm embeds a"),
    ],
)
def test_what_has_no_use_for_a_key_is_refused(sections: dict[str, Any], says: str) -> None:
    tree = base(**sections)
    if "own_task" not in str(sections):
        tree["data"]["train"] = [{"path": "x.jsonl", "weight_field": "own"}]
    else:
        tree["data"] = {}
    with pytest.raises(RecipeError, match=re.escape(says)):
        find_task(validate_recipe(tree, None, BUILT_IN))


def test_a_loss_of_ones_own_does_not_ignore_weights(tmp_path: Path) -> None:
    tree = job(save_talks(tmp_path), task={"loss": "own_task:smoothed"}, output={"dir": str(tmp_path / "run")})
    with pytest.raises(FinetuneError, match=r"weights other than 0 and 1, and a loss of your own .*`weighs=True`"):
        run_here(tree)


def test_answers_that_are_compared_have_no_weights(tmp_path: Path) -> None:
    half = [{"role": "assistant", "content": "yes", "weight": 0.5}]
    pair = {"prompt": [{"role": "user", "content": "a"}], "chosen": half, "rejected": [{**half[0], "content": "no"}]}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    tree = job(tmp_path / "pairs.jsonl", task={"name": "dpo"}, output={"dir": str(tmp_path / "run")})
    with pytest.raises(DataError, match=r"line 1, chosen: an answer counts 1, or turns of it 0"):
        run_here(tree)


# ---------------------------------------------------------------- noise


def test_noise_is_uniform() -> None:
    """Its moments, and no correlation between neighbours, over a million numbers."""
    keys = torch.from_numpy(np.random.SeedSequence(0).generate_state(8, np.uint64).view(np.int64))
    numbers = uniform(hash_tokens(keys, 128), torch.ones(8, 128), 1024) * 32
    assert numbers.min() >= -1
    assert numbers.max() < 1
    assert abs(numbers.mean().item()) < 3e-3
    assert numbers.var().item() == pytest.approx(1 / 3, rel=1e-2)
    for axis in range(3):
        one, two = numbers.narrow(axis, 0, numbers.shape[axis] - 1), numbers.narrow(axis, 1, numbers.shape[axis] - 1)
        assert abs((one * two).mean().item()) < 3e-3
    shares = torch.histc(numbers, 16, -1, 1) / numbers.numel()
    assert (shares - 1 / 16).abs().max() < 1e-3


def test_noise_follows_the_length_of_each_text() -> None:
    """And is there while a batch asks for it, under any task."""
    config = LlamaConfig(hidden_size=16, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    model = ForwardWrapper(AutoModelForSequenceClassification.from_config(config))
    lengths, ids = (5, 12), torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "attention_mask": (torch.arange(12) < torch.tensor(lengths)[:, None]).long()}

    def embedded(batch: Any) -> torch.Tensor:
        found: torch.Tensor = model(lambda network, given: network.get_input_embeddings()(given["input_ids"]), batch)
        return found.detach()

    plain, noisy = embedded(batch), embedded(with_noise(batch, ALPHA, (7, 2), [3, 9]))
    for row, (length, place) in enumerate(zip(lengths, (3, 9), strict=True)):
        wanted = noise_of(7, 2, place, 12, 16) * ALPHA / np.sqrt(length * 16)
        np.testing.assert_allclose((noisy - plain)[row], wanted, atol=1e-6)
    assert torch.equal(embedded(batch), plain)

"""Reward models: the same path however a batch is split, and scores that transformers gives for padded batches."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import Launcher, assert_same_path
from inside import run_here
from recipes_for_tests import ARCHITECTURES, base
from testdata import MODEL
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.models.forward_wrapper import unwrap
from finetune.tasks.classification import class_scores
from finetune.tasks.task_lookup import BUILT_IN
from finetune.training.built_run import BuiltRun
from finetune.utils.errors import RecipeError


def job(micro_size: int = 4, **sections: Any) -> dict[str, Any]:
    """Four steps of eight pairs of built-in answers."""
    return base(
        task={"name": "reward"},
        preference={"centering": 0.1},
        **{
            "model": {"name": MODEL, "config": None},
            "tokenizer": {"name": None},
            "data": {
                "train": [{"sample": 36}],
                "validation": [{"sample": 10}],
                "sequence_length": 512,
                "packing": "padded",
            },
            "chat": {"template": "plain"},
            "batch": {"global_size": 8, "micro_size": micro_size},
            "length": {"steps": 4},
            "optim": {"name": "AdamW", "lr": 2e-3, "weight_decay": 0.0, "clip_norm": None, "args": {"eps": 1e-6}},
            "schedule": {"name": "constant", "warmup_steps": 0},
            "eval": {"every_steps": 4, "micro_size": 3},
            **sections,
        },
    )


def texts(folder: Path, **sections: Any) -> dict[str, Any]:
    """Pairs without turns, of many lengths and with margins; the better answer is the one with `fox`."""
    folder.mkdir(exist_ok=True)
    with (folder / "pairs.jsonl").open("w") as file:
        for number in range(24):
            prompt, chosen, rejected = "What is it? " * (1 + number % 5), "A fox. " * (1 + number % 3), "A hen."
            margin = {"margin": number / 24} if number % 2 else {}
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected, **margin}) + "\n")
    data = {"train": [{"path": str(folder / "pairs.jsonl")}], "validation": [{"path": str(folder / "pairs.jsonl")}]}
    tree = job(chat=None, output={"dir": str(folder / "run")}, **sections)
    return {**tree, "data": {**tree["data"], **data, "cache_dir": str(folder / "cache"), "sequence_length": 64}}


ALL = {"reward": job(), "reward_lora": job(lora={"rank": 4})}
LAUNCHED_RUNS = {"single": {**ALL, "reward_of_1": job(1)}, "ddp": ALL, "fsdp": ALL}
FIGURES = ("reward", "centering", "accuracy", "margin", "mean_reward")


@pytest.mark.parametrize(
    ("config", "name", "as_one"),
    [
        pytest.param("single", "reward_of_1", "reward", marks=pytest.mark.xdist_group("single")),
        *(
            pytest.param(config, name, name, marks=pytest.mark.xdist_group(config))
            for config in ("ddp", "fsdp")
            for name in ALL
        ),
    ],
)
def test_rewards_take_the_single_process_path(launcher: Launcher, config: str, name: str, as_one: str) -> None:
    single, other = (
        launcher.many(kind, LAUNCHED_RUNS[kind])[run].check() for kind, run in (("single", as_one), (config, name))
    )
    assert_same_path(single, other, 2e-5)
    for wanted, line in zip(single.metrics, other.metrics, strict=True):
        for figure in (key for key in wanted if key.removeprefix("validation_") in FIGURES):
            assert line[figure] == pytest.approx(wanted[figure], rel=1e-4, abs=1e-5), figure
    assert {*FIGURES} <= single.steps[0].keys()
    first = single.steps[0]
    assert first["loss"] == pytest.approx(first["reward"] + 0.1 * first["centering"], rel=1e-6)


def halves(run: BuiltRun, row: int) -> list[list[int]]:
    """Returns the tokens of both answers of a row, each behind the prompt."""
    rows: Any = run.data.train
    begins = zip(rows.packed.starts[2 * row : 2 * row + 2], rows.packed.lengths[2 * row : 2 * row + 2], strict=True)
    return [rows.tokens[begin : begin + length].tolist() for begin, length in begins]


def padded(lists: list[list[int]], fill: int, side: str = "right") -> dict[str, torch.Tensor]:
    width = max(map(len, lists))
    ids, mask = torch.full((len(lists), width), fill), torch.zeros(len(lists), width, dtype=torch.long)
    for row, one in enumerate(lists):
        at = slice(0, len(one)) if side == "right" else slice(width - len(one), width)
        ids[row, at], mask[row, at] = torch.tensor(one), 1
    return {"input_ids": ids, "attention_mask": mask}


def test_the_path_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    """Of torch alone, from the formula, with margins and centring; ten steps."""
    plain: list[float] = []

    def meddle(run: BuiltRun) -> None:
        network: Any = copy.deepcopy(unwrap(run.model)).train()
        margins = [json.loads(line).get("margin", 0.0) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
        optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0, eps=1e-6)
        for step in range(10):
            rows = np.concatenate(run.feed.micro_batches(step)).tolist()  # type: ignore[attr-defined]
            both = [halves(run, row) for row in rows]
            inputs = padded([one for one, _ in both] + [other for _, other in both], run.data.tokenizer.pad_token_id)  # type: ignore[union-attr]
            chosen, rejected = network(**inputs, use_cache=False).logits.view(2, -1)
            margin = torch.tensor([margins[row] for row in rows])
            loss = -logsigmoid(chosen - rejected - margin).mean() + 0.1 * ((chosen + rejected) ** 2).mean()
            plain.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    done = run_here(texts(tmp_path, length={"steps": 10}), meddle)
    np.testing.assert_allclose(done.losses, plain, rtol=1e-5)
    assert done.results["validation_accuracy"] == 1.0


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["pad", "eos"])
def test_the_written_model_scores_a_padded_batch_in_transformers(
    pad_is_eos: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.pad_token = tokenizer.eos_token if pad_is_eos else tokenizer.unk_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    given: list[list[int]] = []
    tree = texts(tmp_path / "job", tokenizer={"name": str(tmp_path / "tokenizer")})

    def meddle(run: BuiltRun) -> None:
        given.extend(one for row in range(24) for one in halves(run, row))

    run = run_here(tree, meddle)
    folder = run.directory / "model"
    network, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    assert (network.config.num_labels, network.config.pad_token_id) == (1, tokenizer.pad_token_id)
    assert (tokenizer.pad_token_id == tokenizer.eos_token_id) == pad_is_eos
    assert {one[-1] for one in given} == {tokenizer.eos_token_id}
    with torch.no_grad():
        alone = [network.eval()(torch.tensor([one])).logits.item() for one in given]
        # Where padding is the end, the score is at the token before it.
        endless = [network(torch.tensor([one[:-1]])).logits.item() for one in given]
        assert np.allclose(endless, alone, atol=1e-5) == pad_is_eos
        for side in ("right", "left"):
            batch = padded(given, tokenizer.pad_token_id, side)
            here = class_scores(network, batch)[:, 0]
            np.testing.assert_allclose(network(**batch).logits[:, 0], alone, atol=1e-5)
            np.testing.assert_allclose(here, alone, atol=1e-5)
    margin = float(np.mean(np.array(alone[::2]) - np.array(alone[1::2])))
    assert run.results["validation_margin"] == pytest.approx(margin, abs=1e-5)
    # A text is prompt and answer; the run adds the end that it has learned to score.
    records = [json.loads(line) for line in (tmp_path / "job" / "pairs.jsonl").read_text().splitlines()]
    both = [{"text": record["prompt"] + record[half]} for record in records for half in ("chosen", "rejected")]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in both))
    assert main.main(["predict", str(run.directory), str(tmp_path / "texts.jsonl")]) == 0
    predicted = [json.loads(line)["prediction"] for line in capsys.readouterr().out.splitlines()]
    np.testing.assert_allclose(predicted, alone, atol=1e-4)


def test_a_conversation_has_the_score_of_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a run to `data`, `predict`, `eval` and `export`."""
    turns = [{"role": "user", "content": "What is it?"}]
    answers = {half: [{"role": "assistant", "content": f"A {half}."}] for half in ("chosen", "rejected")}
    file, asked = tmp_path / "pairs.jsonl", tmp_path / "asked.jsonl"
    file.write_text((json.dumps({"prompt": turns, **answers}) + "\n") * 2)
    asked.write_text("".join(json.dumps({"messages": turns + answer}) + "\n" for answer in answers.values()))
    data = {"train": [{"path": str(file)}], "validation": [{"path": str(file)}], "cache_dir": str(tmp_path / "cache")}
    tree = job(2, data={**job()["data"], **data}, batch={"global_size": 2, "micro_size": 2})
    run = run_here({**tree, "output": {"dir": str(tmp_path / "run")}})
    assert main.main(["data", str(run.directory / "recipe.yaml"), "--show", "2"]) == 0
    shown = capsys.readouterr().out
    for words in ("answer [chosen]", "answer [rejected]", "pairs: 2"):
        assert words in shown
    assert main.main(["predict", str(run.directory), str(asked)]) == 0
    chosen, rejected = (json.loads(line)["prediction"] for line in capsys.readouterr().out.splitlines())
    assert chosen - rejected == pytest.approx(run.results["validation_margin"], rel=1e-4)
    assert (chosen + rejected) / 2 == pytest.approx(run.results["validation_mean_reward"], rel=1e-4)
    assert main.main(["eval", str(run.directory), "--data", str(file), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["margin"] == pytest.approx(run.results["validation_margin"], rel=1e-5)
    assert main.main(["export", str(run.directory), "--as", "merged"]) == 0


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {**job()["data"], "packing": "documents"}}, "set `padded`"),
        ({"preference": {"beta": 0.2}}, "preference.beta is no key of task reward"),
        ({"preference": {"loss": ["sigmoid"]}}, "preference.loss names sigmoid"),
        ({"preference": {"centering": 0.0}}, "preference.centering is 0.0"),
        ({"task": {"name": "dpo"}, "data": {"packing": "documents"}}, "preference.centering is no key of task dpo"),
        ({"task": {"name": "reward", "num_labels": 2}}, "task.num_labels"),
        ({"eval": {"metrics": ["accuracy"]}}, "reward always reports accuracy, margin, mean_reward"),
        ({"sample": {"prompt": "Once"}}, "writes no text"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(words)):
        validate_recipe({**job(), **sections}, tasks=BUILT_IN)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    """It scores its first token, which is not put before an answer."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.cls_token = tokenizer.unk_token
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = ARCHITECTURES["bert"]["model"]
    with pytest.raises(RecipeError, match="scores a text at <unk>, its first token"):
        run_here(texts(tmp_path, model=model, tokenizer={"name": str(tmp_path / "tokenizer")}))


def test_a_row_is_as_long_as_the_longest_answer(tmp_path: Path) -> None:
    """There is no target behind the last token, so that `sequence_length` is the most tokens of a row."""
    sizes: list[list[int]] = []

    def rows_of(sequence_length: int) -> int:
        tree = texts(tmp_path, length={"steps": 1})
        data = {**tree["data"], "sequence_length": sequence_length}
        runs: list[BuiltRun] = []
        run_here({**tree, "data": data, "output": {"dir": str(tmp_path / f"run{sequence_length}")}}, runs.append)
        rows: Any = runs[0].data.train
        sizes.append([max(map(len, halves(runs[0], row))) for row in range(len(rows))])
        return len(rows)

    assert rows_of(64) == 24
    longest = max(sizes[0])
    assert rows_of(longest) == 24
    assert rows_of(longest - 1) == sum(size < longest for size in sizes[0])

"""Metrics of generated texts and of classes: their values, and that they are the same on every backend."""

import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import own_task
import pytest
import torch
import yaml
from forkserver import ForkServer
from harness import ROOT, Launcher, Result
from inside import ONE_RANK, early_stopping, evaluate_batches, mlp, run_here
from recipes_for_tests import base
from testdata import MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "scripts"))

import architectures as script

from finetune.config.recipe import validate_recipe
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.tasks.causal_lm import CAUSAL_LM, next_token_logits
from finetune.tasks.metrics import build_metrics, check_metrics, find_metrics, score_predictions
from finetune.tasks.prompt_set import read_prompts
from finetune.tasks.task_lookup import BUILT_IN, find_task
from finetune.training import evaluate_run
from finetune.utils.errors import DataError, RecipeError

TEXTS = ("exact_match", "f1", "rouge1", "rouge2", "rougeL")
OWN = ("own_metrics:num_words", "own_metrics:several")

# ---------------------------------------------------------------- values


def test_without_evaluations_nothing_can_be_the_best_by_a_figure() -> None:
    """No key can be named then: another way out is told."""
    none: Any = SimpleNamespace(validation=None)
    for checkpoint, patience, end in (
        ({"keep_best_by": "validation_recall_macro"}, {}, "to null."),
        ({}, {"every_steps": 2, "patience": 1}, "to null, and take out eval.patience."),
    ):
        tree = base(
            task={"name": "sequence_classification"}, data={"packing": "padded"}, checkpoint=checkpoint, eval=patience
        )
        recipe = validate_recipe(tree)
        with pytest.raises(RecipeError, match="nothing is evaluated: there are no validation rows") as caught:
            build_metrics(recipe, find_task(recipe), none, ())
        assert str(caught.value).endswith(end)


def scores(names: Sequence[str], predictions: Sequence[str], references: Sequence[Any]) -> dict[str, float]:
    return score_predictions(find_metrics(names), predictions, references)


def test_words_by_hand() -> None:
    """One right but for case, article and punctuation; one half right by its second reference; one wrong."""
    predictions = ["The Cat!", "a red ball", "nothing"]
    references = [["cat"], ["blue", "red balls are round"], ["sun"]]
    assert scores(["exact_match"], predictions, references) == {"exact_match": pytest.approx(1 / 3)}
    # Words red, ball beside red, balls, are, round: 1 in common of 2 and 4.
    assert scores(["f1"], predictions, references) == {"f1": pytest.approx((1 + 2 * 1 / 6 + 0) / 3)}
    assert scores(["exact_match", "f1"], [""], [["the"]]) == {"exact_match": 1.0, "f1": 1.0}
    assert scores(["f1"], [""], [["cat"]]) == {"f1": 0.0}
    # A word counts as often as it is there.
    assert scores(["f1"], ["cat cat cat"], [["cat cat"]]) == {"f1": pytest.approx(4 / 5)}


def test_words_as_torchmetrics_has_them() -> None:
    from torchmetrics.functional.text import squad

    predictions = ["the red, red ball", "Tom's dog ran.", "a", "He is   at home"]
    references = [["A red ball", "red red"], ["Toms dog"], ["a cat"], ["he is at home"]]
    found = scores(["exact_match", "f1"], predictions, references)
    pairs = zip(predictions, references, strict=True)
    asked = [
        (
            {"prediction_text": text, "id": str(n)},
            {"answers": {"text": all_, "answer_start": [0] * len(all_)}, "id": str(n)},
        )
        for n, (text, all_) in enumerate(pairs)
    ]
    theirs = squad([one for one, _ in asked], [other for _, other in asked])
    assert found == pytest.approx({key: float(value) / 100 for key, value in theirs.items()})


def test_rouge_by_hand() -> None:
    """`the cat sat down` beside `the cat lay down`: 3 of 4 words, 1 of 3 pairs, a subsequence of 3."""
    found = scores(["rouge1", "rouge2", "rougeL"], ["The cat sat down"], [["something else", "the cat lay down."]])
    assert found == pytest.approx({"rouge1": 3 / 4, "rouge2": 1 / 3, "rougeL": 3 / 4})


def test_classes_by_hand() -> None:
    predicted, true = ["a", "a", "b", "c"], ["a", "b", "b", "d"]
    assert scores(["accuracy"], predicted, true) == {"accuracy": 0.5}
    # a: 2/3, b: 2/3, c and d: 0.
    found = scores(["f1_macro"], predicted, true)
    assert found == {"f1_macro": pytest.approx(1 / 3)}
    from torchmetrics.functional.classification import multiclass_f1_score

    numbers = [torch.tensor(["abcd".index(name) for name in side]) for side in (predicted, true)]
    theirs = multiclass_f1_score(*numbers, num_classes=4, average="macro")
    assert found["f1_macro"] == pytest.approx(float(theirs))
    assert scores(["accuracy", "f1_macro"], ["a"], ["a"]) == {"accuracy": 1.0, "f1_macro": 1.0}


def test_own_functions() -> None:
    found = scores(OWN, ["one two", "three"], [["x"], ["y", "z"]])
    assert found == {"num_words": 1.5, "prompts": 2.0, "references": 3.0}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own_metrics:fails", r"'own_metrics:fails' ends in ZeroDivisionError: .* \(own_metrics.py, line 1\d\)"),
        ("own_metrics:nonesuch", "eval.metrics: cannot import 'own_metrics:nonesuch'"),
        ("own_metrics:named_wrongly", "calls a metric 'loss'.* loss, perplexity, targets are taken"),
        ("own_metrics:text", "ends in ValueError: could not convert string to float: 'good'"),
    ],
)
def test_own_functions_that_fail(name: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        scores([name], ["a"], [["b"]])


def test_a_missing_library_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = validate_recipe(texts())
    check_metrics(recipe.eval.metrics)
    monkeypatch.setattr("finetune.tasks.metrics.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"rouge1, rouge2, rougeL cannot .*`pip install 'finetune\[metrics\]'"):
        check_metrics(recipe.eval.metrics)
    check_metrics(["exact_match", "f1"])
    assert importlib.util.find_spec("torchmetrics") is not None


# ---------------------------------------------------------------- recipes


def texts(**section: Any) -> dict[str, Any]:
    """Evaluates a model that has learned stories, on texts that it writes."""
    tree = base(data={"train": []}, length={"steps": 0}, model={"name": MODEL, "config": None}, tokenizer={})
    metrics = [*TEXTS, *OWN]
    tree["eval"] = {"metrics": metrics, "prompts": [{"sample": 9}], "max_new_tokens": 12, **section}
    return tree


def classes(**section: Any) -> dict[str, Any]:
    """Evaluates a small BERT that knows nothing."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "task": {"name": "sequence_classification"},
        "model": {"config": {"model_type": "bert", **small}},
        "tokenizer": {"name": MODEL},
        "data": {"validation": [{"sample": 30}], "sequence_length": 64, "packing": "padded"},
        "length": {"steps": 0},
        "precision": "fp32",
        "seed": 5,
        "eval": {"metrics": ["accuracy", "f1_macro"], **section},
    }


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        (texts(metrics=["rouge3"]), r"eval.metrics: there is no metric 'rouge3', did you mean 'rouge"),
        (texts(prompts=[]), "eval.metrics: they are computed of texts .* `eval.prompts`"),
        (texts(metrics=[]), "eval.prompts: without `eval.metrics` nothing is generated"),
        (texts(prompts=[{"sample": 2, "weight": 2.0}]), "eval.prompts.0.weight: every prompt counts once"),
        (texts(prompts=[{"sample": 2, "label_field": "x"}]), "eval.prompts.0.label_field: prompts and references are"),
        (texts(prompts=[{"sample": 2, "text_field": "x"}]), "eval.prompts.0.text_field: prompts and references are"),
        (classes(prompts=[{"sample": 2}]), "eval.prompts: a classifier writes no text"),
        (classes(metrics=["rouge1"]), "there is no metric 'rouge1'.*allowed are accuracy, f1_macro"),
        (texts(patience=2), "eval.patience: .* give `eval.every_steps`"),
        ({**texts(patience=2, every_steps=1), "checkpoint": {"keep_best_by": None}}, "eval.patience: .* is null"),
        (
            {**texts(metrics=["rouge1"]), "checkpoint": {"keep_best_by": "rouge1"}},
            "keep_best_by: no evaluation has 'rouge1', did you mean 'validation_rouge1'",
        ),
    ],
)
def test_what_contradicts_is_said(tree: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        validate_recipe(tree, tasks=BUILT_IN)


def test_what_no_evaluation_has_is_said_before_the_first_step(tmp_path: Path) -> None:
    tree = {**texts(), "checkpoint": {"keep_best_by": "validation_nonesuch"}, "output": {"dir": str(tmp_path / "run")}}
    with pytest.raises(
        RecipeError, match=r"no 'validation_nonesuch'; they have validation_loss, .*validation_num_words"
    ):
        run_here(tree)
    assert not (tmp_path / "run" / "run.json").exists()


# ---------------------------------------------------------------- prompts


def prompts_of(
    tmp_path: Path, records: list[Any], *, chat: bool = False, **source: Any
) -> list[tuple[str, tuple[str, ...]]]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    tree = texts(prompts=[{"path": str(file), **source}])
    recipe = validate_recipe({**tree, **({"chat": {"template": "plain"}} if chat else {})})
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    found = read_prompts(recipe, tokenizer)
    for prompt in found:
        assert tokenizer.decode(prompt.ids, skip_special_tokens=not chat).strip() == prompt.text.strip()
    return [(prompt.text, prompt.references) for prompt in found]


def test_prompts_are_read(tmp_path: Path) -> None:
    one, two = (
        {"prompt": "Tom ran.", "reference": "He was fast."},
        {"prompt": "Sue sat.", "references": ["She.", "It."]},
    )
    wanted = [("Tom ran.", ("He was fast.",)), ("Sue sat.", ("She.", "It."))]
    assert prompts_of(tmp_path, [one, two]) == wanted
    assert prompts_of(tmp_path, [one, two], limit=1) == wanted[:1]
    squad = [{"question": "Who?", "answers": {"text": ["Tom", "Sue"], "answer_start": [0, 4]}}]
    paths = {"prompt": "question", "references": "answers.text"}
    assert prompts_of(tmp_path, squad, fields=paths) == [("Who?", ("Tom", "Sue"))]


def test_conversations_are_prompts(tmp_path: Path) -> None:
    turns = [("user", "Hi."), ("assistant", "Hello."), ("user", "Who is it?"), ("assistant", "A cat.")]
    talk = {"messages": [{"role": role, "content": text} for role, text in turns]}
    pair = {"prompt": "Who ran?", "references": ["Tom", "Sue"]}
    both = prompts_of(tmp_path, [pair, talk], chat=True)
    assert [references for _, references in both] == [("Tom", "Sue"), ("A cat.",)]
    assert both[0][0].endswith("Assistant:")
    assert "Hello." in both[1][0]
    assert both[1][0].endswith("Assistant:")
    assert "A cat." not in both[1][0]


@pytest.mark.parametrize(
    ("record", "chat", "said"),
    [
        ({"prompt": "Tom ran."}, False, "line 2: .* the fields are prompt. Name others in the source's `fields`"),
        ({"prompt": "Tom ran.", "references": []}, False, "line 2: the references of a prompt are texts, at least one"),
        ({"prompt": "Tom " * 200, "reference": "x"}, False, r"line 2: the prompt has \d+ tokens, .* 128"),
        (
            {"prompt": "2 + 2", "reference": 4},
            False,
            "line 2: the field 'reference' holds a number, and prompts and ref",
        ),
        ({"prompt": "2 + 2", "references": 4}, True, "line 2: the field 'references' holds a number"),
        ({"prompt": True, "reference": "a"}, False, "line 2: the field 'prompt' holds a bool"),
        ({"prompt": "\ud83d", "reference": "a"}, False, "line 2: the text holds half a character"),
        ({"prompt": "a", "references": ["a", "\ud83d"]}, True, "line 2: the text holds half a character"),
        ({"messages": [{"role": "user", "content": "Hi."}]}, True, "line 2: there is no answer to be the reference"),
    ],
)
def test_prompts_that_are_refused(tmp_path: Path, record: Any, chat: bool, said: str) -> None:
    with pytest.raises(DataError, match=r"prompts.jsonl, " + said):
        prompts_of(tmp_path, [{"prompt": "a", "reference": "b"}, record], chat=chat)


# ---------------------------------------------------------------- generation


# Windows, experts, positions counted from a mask or added to the scores; a state instead of keys and values; a cache
# that gives other tokens.
KINDS = ("llama", "gpt2", "opt", "bloom", "mistral", "gemma2", "mixtral", "mamba", "moshi")


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_without_a_cache(kind: str) -> None:
    network = script.network_of(kind)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(100, script.VOCABULARY, (length,), generator=generator).tolist() for length in (1, 5, 20)]
    backend: Any = SimpleNamespace(
        mesh=ONE_RANK,
        device=torch.device("cpu"),
        all_reduce_sum=lambda values: values,
        evaluate_batches=evaluate_batches,
        share_buffers=lambda network: None,
    )
    ends = {7}
    found = evaluate_run.generate_tokens(
        backend,
        ForwardWrapper(network).eval(),
        CAUSAL_LM,
        prompts,
        longest=30,
        max_new_tokens=16,
        ends=ends,
        stopping=lambda: False,
    )
    for prompt, text in zip(prompts, found or [], strict=True):
        row: list[int] = []
        while len(row) < 16 and len(prompt) + len(row) < 30:
            with torch.no_grad():
                ids = torch.tensor([prompt + row])
                token = int(network(input_ids=ids, use_cache=False).logits[0, -1].argmax())
            if token in ends:
                break
            row.append(token)
        assert text == row
    assert len({token for text in found or [] for token in text}) > 2


JOBS = {
    "texts": texts(),
    "classes": classes(),
    "classes_micro_3": classes(micro_size=3),
}
# Launched together.
ALL = {**JOBS, "early": early_stopping(Path("set by the launcher"))}


def marked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


LAUNCHED_RUNS = {**dict.fromkeys(("single", "fsdp", "zero3"), ALL), "tp": {"texts": JOBS["texts"]}}


def predictions(run: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.check().directory / "predictions.jsonl").read_text().splitlines()]


def values(run: Result) -> dict[str, float]:
    return {key: value for key, value in run.facts["results"].items() if key.startswith("validation_")}


@pytest.mark.parametrize("backend", marked("single", "fsdp", "zero3"))
def test_every_backend_predicts_alike(launcher: Launcher, backend: str) -> None:
    single, other = (launcher.many(name, ALL) for name in ("single", backend))
    for name in JOBS:
        run = other[name]
        wanted = single[name.partition("_micro")[0]]
        assert predictions(run) == predictions(wanted)
        counted = ("validation_loss", "validation_perplexity")
        assert {k: v for k, v in values(run).items() if k not in counted} == {
            k: v for k, v in values(wanted).items() if k not in counted
        }
        assert [values(run)[k] for k in counted if k in values(run)] == pytest.approx(
            [values(wanted)[k] for k in counted if k in values(wanted)], rel=1e-5
        )


@pytest.mark.xdist_group("tp")
def test_ranks_that_share_layers_write_the_same_texts(launcher: Launcher) -> None:
    single, split = launcher.many("single", ALL)["texts"], launcher.many("tp", LAUNCHED_RUNS["tp"])["texts"]
    assert predictions(split) == predictions(single)
    assert {name: values(split)[f"validation_{name}"] for name in TEXTS} == {
        name: values(single)[f"validation_{name}"] for name in TEXTS
    }


@pytest.mark.parametrize("backend", marked("fsdp", "zero3"))
def test_all_ranks_end_together(launcher: Launcher, backend: str) -> None:
    wanted, found = (
        launcher.many(name, ALL)["early"].check().facts["results"]["ended_early"] for name in ("single", backend)
    )
    assert (found["step"], found["best"]["step"]) == (wanted["step"], wanted["best"]["step"]) == (14, 8)
    assert found["best"]["value"] == pytest.approx(wanted["best"]["value"], rel=1e-4)


@pytest.mark.xdist_group("single")
def test_what_is_written_of_texts(launcher: Launcher) -> None:
    run = launcher.many("single", ALL)["texts"].check()
    lines, found = predictions(run), values(run)
    assert len(lines) == found["validation_prompts"] == 9
    assert len({line["prediction"] for line in lines}) > 3
    assert set(lines[0]) == {"step", "prompt", "prediction", "references"}
    again = scores(TEXTS, [line["prediction"] for line in lines], [line["references"] for line in lines])
    assert again == {key: found[f"validation_{key}"] for key in TEXTS}
    assert 0 < again["rouge1"] < 1
    assert f"rouge1 {again['rouge1']:.4f}" in run.output
    (logged,) = [line for line in run.metrics if "validation_rouge1" in line]
    assert {key: logged[key] for key in found} == found
    # What plain transformers writes.
    network, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
    for line in lines[:3]:
        ids = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(line["prompt"], add_special_tokens=False)]])
        theirs = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert tokenizer.decode(theirs[0, ids.shape[1] :], skip_special_tokens=True).strip() == line["prediction"]


@pytest.mark.xdist_group("single")
def test_what_is_written_of_classes(launcher: Launcher) -> None:
    run = launcher.many("single", ALL)["classes"].check()
    lines, found = predictions(run), values(run)
    assert [line["row"] for line in lines] == list(range(30))
    assert len({line["references"][0] for line in lines}) > 3
    hits = sum(line["prediction"] == line["references"][0] for line in lines)
    assert found["validation_accuracy"] == hits / 30
    assert 0 < found["validation_f1_macro"] < 1
    assert lines[0]["prompt"]


def test_a_request_to_stop_ends_generation(tmp_path: Path) -> None:
    tree = {**texts(), "output": {"dir": str(tmp_path / "run")}}
    asked: list[int] = []

    def meddle(run: Any) -> None:
        forward = run.model.forward

        def stop_at_fifth(function: Any, batch: Any) -> Any:
            if getattr(function, "func", None) is next_token_logits:
                asked.append(1)
                if len(asked) == 5:
                    run.shutdown.reason = "a test"
            return forward(function, batch)

        run.model.forward = stop_at_fifth

    done = run_here(tree, meddle)
    assert done.results["stopped"] == "a test"
    assert len(asked) == 5
    assert not (tmp_path / "run" / "predictions.jsonl").exists()
    assert "validation_loss" not in done.results


def test_an_own_function_that_fails_later_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'own_metrics:fails_later' ends in ZeroDivisionError"):
        run_here({**texts(metrics=["own_metrics:fails_later"]), "output": {"dir": str(tmp_path / "run")}})


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"metrics_{name}"))
        for name in ("ddp", "fsdp", "zero2", "zero3")
    ],
)
def test_what_is_evaluated_is_what_is_written(fork_server: ForkServer, tmp_path: Path, backend: str) -> None:
    """Also of batch norms, whose statistics each rank has of its own rows: rank 0's are in the model."""
    normed = {"task": {"name": "own_task:mlp", "args": {"normed": True}}}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(mlp(tmp_path / "run", **normed)))
    code, output = fork_server.launch(backend, file)
    assert code == 0, output
    task = own_task.mlp(normed=True)
    network = task.build_model(validate_recipe(mlp(tmp_path / "run", **normed)), None).eval()
    network.load_state_dict(Result(0, output, tmp_path / "run").weights)
    rows = np.arange(33)
    with torch.no_grad():
        loss = task.loss_sum(network, own_task.Points(33, 2).batch(rows)).item() / len(rows)
    assert Result(0, output, tmp_path / "run").validation() == pytest.approx(loss, rel=1e-5)

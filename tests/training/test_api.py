"""The Python API: what a recipe does, from a script or a notebook."""

import json
import os
import re
import subprocess
import sys
import threading
import time
import typing
from pathlib import Path

import numpy as np
import own_metrics
import own_task
import pytest
import torch
from harness import ROOT, environment
from inside import mlp, run_here
from own_optimizers import TwoRates

import finetune
from finetune import Recipe, Run, launch, load_recipe, start, train
from finetune.training import api, loop, step_metrics
from finetune.utils.errors import CheckpointError, DataError, LaunchError, RecipeError
from finetune.utils.import_object import handed_over, import_object, name_of

PAGE = ROOT / "docs/api.md"
STORIES = [f"Story {n}: Ann had {n % 7} pears and {n % 5} apples." for n in range(120)]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 300,
}


def language_model(folder: Path, **sections: typing.Any) -> dict[str, typing.Any]:
    return {
        "model": {"config": LLAMA},
        "tokenizer": {"vocab_size": 300},
        "data": {"sequence_length": 32, "cache_dir": str(folder / "cache"), "validation_fraction": 0.1},
        "batch": {"global_size": 4, "micro_size": 2},
        "length": {"steps": 4},
        "log": {"every_steps": 1},
        "output": {"dir": str(folder / "run")},
        "precision": "fp32",
        **sections,
    }


# ---------------------------------------------------------------- recipes


def test_a_recipe_by_name_with_sections_and_overrides() -> None:
    recipe = load_recipe("sample", "optim.lr=2e-3", optim={"weight_decay": 0.0}, seed=7)
    plain = load_recipe("sample")
    assert isinstance(recipe, Recipe)
    assert (recipe.optim.lr, recipe.optim.weight_decay, recipe.seed) == (2e-3, 0.0, 7)
    assert recipe.optim.args == plain.optim.args
    assert recipe.model == plain.model


def test_what_is_set_here_replaces_the_keys_that_it_excludes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sections, overrides and objects alike; two of them that exclude each other are refused."""
    sample = load_recipe("sample")
    assert sample.length.steps is not None
    for recipe in (load_recipe("sample", length={"epochs": 2}), load_recipe(sample, "length.epochs=2")):
        assert recipe.length.model_dump(exclude_none=True) == {"epochs": 2.0}
    steps = sample.length.steps
    in_file, of_recipe = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"length\.epochs replaces length\.steps: {steps} of .*sample\.yaml:\d+", in_file)
    assert of_recipe == f"length.epochs=2 replaces length.steps: {steps} of the recipe"
    with pytest.raises(RecipeError, match=r"^length\.epochs and length\.tokens=5 exclude each other: length: give"):
        load_recipe("sample", "length.tokens=5", length={"epochs": 2})
    with pytest.raises(RecipeError, match=r"^task\.class_weights=balanced and task\.loss=.* exclude each other"):
        train(mlp(tmp_path), "task.class_weights=balanced", loss=print)


def test_typed_sections_give_what_was_set_and_keep_the_rest() -> None:
    typed = load_recipe("sample", optim=finetune.OptimSection(lr=1e-2), data=finetune.DataSection(add_eos=False))
    plain = load_recipe("sample", optim={"lr": 1e-2}, data={"add_eos": False})
    assert typed == plain
    assert typed.data.train == load_recipe("sample").data.train != ()


def test_the_same_recipe_in_every_form(tmp_path: Path) -> None:
    tree = mlp(tmp_path / "run")
    first = load_recipe(tree)
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(tree))
    assert first == load_recipe(first) == load_recipe(file) == load_recipe(str(file)) == load_recipe(**tree)


def test_a_wrong_recipe_is_refused_with_its_key() -> None:
    with pytest.raises(RecipeError, match=r"optim\.lrr: unknown key, did you mean 'lr'\?"):
        load_recipe("sample", optim={"lrr": 1})
    with pytest.raises(RecipeError, match=r"one of the recipes that ship: .*sample"):
        load_recipe("smaple")


# ---------------------------------------------------------------- in this process


def test_train_is_what_the_command_does(tmp_path: Path) -> None:
    by_command = run_here(mlp(tmp_path / "command"))
    run = train(mlp(tmp_path / "python"), quiet=True)
    assert (run.status, run.directory) == ("finished", tmp_path / "python")
    assert run.metrics["loss"].tolist() == by_command.losses
    assert run.results["model"] == str(tmp_path / "python/model")
    assert run.recipe == load_recipe(mlp(tmp_path / "python"))
    assert [saved.step for saved in run.checkpoints] == [15, 20]
    best = run.history.best_evaluation
    assert best is not None
    shown = f"Run('{run.directory}', finished at step 20, validation loss {best[1]:.4g} at step 20)"
    assert (str(run), repr(run)) == (shown, shown)


def test_steps_one_by_one(tmp_path: Path) -> None:
    training = start(mlp(tmp_path / "run", log={"every_steps": 2}, eval={"every_steps": 10}), quiet=True)
    assert isinstance(training.model, torch.nn.Sequential)
    before = training.model[0].weight.detach().clone()
    steps = list(training.steps())
    assert [step.step for step in steps] == [*range(1, training.num_steps + 1)]
    assert [step.step for step in steps if step.metrics] == [1, *range(2, 21, 2)]
    assert [step.step for step in steps if step.validation] == [10, 20]
    assert steps[-1].validation["validation_loss"] == training.results["validation_loss"]
    assert not torch.equal(before, training.model[0].weight)


def test_what_the_caller_does_with_a_step_is_no_part_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of its time, nor of tokens a second: by a clock that the caller moves on by hours."""
    late, clock = 0.0, time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late)
    training = start(mlp(tmp_path / "run", log={"every_steps": 2}), quiet=True)
    metrics = []
    for step in training.steps():
        late += 10_000.0
        metrics += [step.metrics] if step.metrics else []
    assert len(metrics) == 11
    assert all(line["step_s"] < 1000.0 for line in metrics)
    assert all(line["tokens_per_s"] > 1e-2 for line in metrics)


def test_a_run_that_fails_lets_go_of_its_directory_when_it_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next run in the process finds a checkpoint that is being written, and that then changes its name."""
    training = start(mlp(tmp_path / "run", checkpoint={"every_steps": 5}), quiet=True)
    checkpoints, directory = training._run.checkpoints, training._run.directory
    held, release, busy, failing = threading.Event(), directory.release, [], step_metrics.log_step
    snapshot = checkpoints._saver._snapshot
    write = snapshot.write

    def write_late(*given: typing.Any) -> typing.Any:
        assert held.wait(60)
        return write(*given)

    def fail(run: typing.Any, *given: typing.Any) -> typing.Any:
        if run.state.step == 6:
            threading.Timer(0.2, held.set).start()
            raise ArithmeticError("a task's own error")
        return failing(run, *given)

    def released() -> None:
        busy.append(checkpoints._saver.busy)
        release()

    monkeypatch.setattr(snapshot, "write", write_late)
    monkeypatch.setattr(loop, "log_step", fail)
    monkeypatch.setattr(directory, "release", released)
    with pytest.raises(ArithmeticError):
        list(training.steps())
    assert busy == [False]
    monkeypatch.undo()
    assert train(mlp(tmp_path / "run", checkpoint={"every_steps": 5}), quiet=True).status == "finished"


@pytest.mark.parametrize("how", ["break", "stop", "error"])
def test_leaving_the_loop_saves_and_the_same_call_resumes(tmp_path: Path, how: str) -> None:
    whole = train(mlp(tmp_path / "whole"), quiet=True)
    tree = mlp(tmp_path / "run", checkpoint={"every_steps": None})
    training = start(tree, quiet=True)

    def leave() -> None:
        for step in training.steps():
            if step.step == 7 and how == "break":
                break
            if step.step == 7 and how == "error":
                raise KeyError("a caller's own")
            if step.step == 7:
                training.stop("enough")

    if how == "error":
        with pytest.raises(KeyError):
            leave()
    else:
        leave()
    left = Run.open(training.directory)
    assert (left.status, [saved.step for saved in left.checkpoints]) == ("stopped", [8])
    assert left.results["stopped"] == ("enough" if how == "stop" else "stopped by its program")
    run = train(tree, quiet=True)
    assert run.status == "finished"
    assert run.metrics["loss"].tolist() == whole.metrics["loss"].tolist()


def test_a_run_that_cannot_start_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="momentous"):
        train(mlp(tmp_path / "run", optim={"name": "SGD", "args": {"momentous": 1}}), quiet=True)
    # The other precision would be refused by what the first has left.
    assert train(mlp(tmp_path / "run", precision="bf16", length={"steps": 2}), quiet=True).status == "finished"


# ---------------------------------------------------------------- objects


def test_a_task_loss_and_optimiser_are_handed_over(tmp_path: Path) -> None:
    named = run_here(mlp(tmp_path / "named", optim={"name": "own_optimizers:TwoRates"}))
    tree = mlp(tmp_path / "handed", task={"name": "causal_lm"})
    run = train(tree, quiet=True, task=own_task.mlp, optimizer=TwoRates)
    assert run.metrics["loss"].tolist() == named.losses
    assert (run.recipe.task.name, run.recipe.optim.name) == ("own_task:mlp", "own_optimizers:TwoRates")
    # No name: another process could not find it.
    twice = train(
        mlp(tmp_path / "lambda", task={"name": "causal_lm"}),
        quiet=True,
        task=own_task.mlp(),
        loss=lambda network, batch: 2 * own_task.mlp().loss_sum(network, batch),
    )
    assert (twice.recipe.task.name, twice.recipe.task.loss) == ("python:task", "python:loss")
    assert twice.metrics["loss"][0] == pytest.approx(2 * named.losses[0], rel=1e-6)
    with pytest.raises(RecipeError, match=r"task\.name: 'python:task' stands for an object .* Hand it over here too"):
        train(twice.recipe, "resume=must", quiet=True)


def test_metrics_and_prompts_are_handed_over(tmp_path: Path) -> None:
    class Longest:
        def __call__(self, predictions: list[str], references: list[list[str]]) -> float:
            return max(map(len, predictions))

    prompts = [{"prompt": "Story 1:", "reference": STORIES[1]}, {"prompt": "Ann had", "reference": "pears"}]
    tree = language_model(tmp_path, eval={"metrics": ["f1"], "max_new_tokens": 4}, length={"steps": 1})
    handed: typing.Any = {"train_data": STORIES, "prompts": prompts, "metrics": [own_metrics.num_words, Longest()]}
    run = train(tree, quiet=True, **handed)
    assert run.recipe.eval.metrics == ("f1", "own_metrics:num_words", "python:metrics.1:Longest")
    lines = [json.loads(line) for line in (run.directory / "predictions.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["references"]) for line in lines] == [
        ("Story 1:", [STORIES[1]]),
        ("Ann had", ["pears"]),
    ]
    texts = [line["prediction"] for line in lines]
    assert run.results["validation_Longest"] == max(map(len, texts))
    assert run.results["validation_num_words"] == own_metrics.num_words(texts, [[], []])
    assert run.history.metrics == ("validation_f1", "validation_num_words", "validation_Longest")
    # Handed over again, they are not there twice; not handed over, they are missed.
    assert train(run.recipe, quiet=True, **handed).recipe.eval.metrics == run.recipe.eval.metrics
    with pytest.raises(RecipeError, match=r"eval\.metrics: 'python:metrics\.1:Longest' stands for an object"):
        train(run.recipe, "length.steps=2", quiet=True)
    with pytest.raises(RecipeError, match=r"metrics\.0:Longest: this object has no name"):
        launch(tree, "ddp", train_data=STORIES, prompts=prompts, metrics=[Longest()])


def test_records_are_read_as_a_file_of_them(tmp_path: Path) -> None:
    file = tmp_path / "stories.jsonl"
    file.write_text("".join(json.dumps({"text": story}) + "\n" for story in STORIES))
    tree = language_model(tmp_path)
    data = {**tree["data"], "train": [{"path": str(file)}]}
    by_file = train({**tree, "data": data, "output": {"dir": str(tmp_path / "by_file")}}, quiet=True)
    texts = train({**tree, "output": {"dir": str(tmp_path / "texts")}}, quiet=True, train_data=STORIES)
    assert texts.metrics["loss"].tolist() == by_file.metrics["loss"].tolist()
    # A function, mappings, and a second source; the same records are the same file.
    run = train(
        {**tree, "output": {"dir": str(tmp_path / "mappings")}},
        quiet=True,
        train_data=lambda: ({"text": story} for story in STORIES),
        validation_data=STORIES[:20],
    )
    assert run.recipe.data.train == texts.recipe.data.train
    assert run.evaluations["validation_loss"].shape == (1,)
    model = run.load_model()
    written = model.network(input_ids=torch.tensor([[1, 2, 3]])).logits
    assert written.shape == (1, 3, 300)
    assert run.exports == ()


def test_a_loss_of_ones_own_is_what_is_trained_and_evaluated(tmp_path: Path) -> None:
    tree = language_model(tmp_path, length={"steps": 1})
    plain = train({**tree, "output": {"dir": str(tmp_path / "plain")}}, quiet=True, train_data=STORIES)
    run = train(tree, quiet=True, train_data=STORIES, loss=own_task.smoothed)
    assert run.recipe.task.loss == "own_task:smoothed"
    assert run.history.facts["kernels"]["loss"] == "plain"
    # At first weights near 0 all tokens are alike, and smoothing changes little; but it does.
    assert run.metrics["loss"][0] != plain.metrics["loss"][0]
    assert run.metrics["loss"][0] == pytest.approx(plain.metrics["loss"][0], rel=0.02)
    assert run.evaluations["validation_loss"][0] != plain.evaluations["validation_loss"][0]


def test_what_cannot_be_handed_over_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = mlp(tmp_path / "run")
    with pytest.raises(DataError, match="Record 2 of what was handed over cannot be written as JSON"):
        train(language_model(tmp_path), train_data=["a", object()])  # type: ignore[list-item]
    assert not list((tmp_path / "cache/records").iterdir())
    with pytest.raises(RecipeError, match=r"loss: this object has no name .* Define it at the top level of a file"):
        launch(tree, "ddp", loss=lambda network, batch: network(batch))
    monkeypatch.setattr(own_task, "number", 3, raising=False)
    with pytest.raises(RecipeError, match=r"task\.loss: 'own_task:number' is int, not a function"):
        train({**tree, "task": {"name": "own_task:mlp", "loss": "own_task:number"}}, quiet=True)
    with pytest.raises(TypeError, match="unknown: los; allowed: task, loss"):
        train(tree, los=own_task.smoothed)  # type: ignore[call-arg]


def test_objects_by_name_and_by_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import beside\nvalue = beside.value\nclass Inner:\n    deep = 5\n")
    (tmp_path / "beside.py").write_text("value = [4]\n")
    assert import_object(f"{file}:value", "task.loss") == [4]
    assert import_object(f"{file}:value", "task.loss") is import_object(f"{file}:value", "task.loss")
    assert import_object(f"{file}:Inner.deep", "task.loss") == 5
    for name in (f"{file}:nothing", f"{tmp_path}/no.py:value", "no_such_module:x", "json:nothing"):
        with pytest.raises(RecipeError, match=r"task\.loss: cannot import .* or as file\.py:object"):
            import_object(name, "task.loss")
    assert name_of(own_task.mlp) == "own_task:mlp"
    assert name_of(TwoRates) == "own_optimizers:TwoRates"
    assert name_of(own_task.Points.batch) == "own_task:Points.batch"
    assert name_of(lambda: 0) is name_of(own_task.mlp()) is name_of(3) is None
    with handed_over({"loss": own_task.mlp, "task": 3}) as names:
        assert names == {"loss": "own_task:mlp", "task": "python:task"}
        assert import_object("python:task", "task.name") == 3
    with pytest.raises(RecipeError, match="stands for an object"):
        import_object("python:task", "task.name")


# ---------------------------------------------------------------- processes of their own


def test_the_page_runs(tmp_path: Path, quick_python: str) -> None:
    """Each example of docs/api.md, as a program in an empty folder; the second one launches two processes."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    said = []
    for number, block in enumerate(blocks):
        file = tmp_path / f"example_{number}.py"
        file.write_text(block)
        done = subprocess.run(
            [quick_python, str(file)], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said.append(done.stdout.split())
    assert said[0][0] == "finished"
    assert float(said[0][1]) < 5.5
    assert said[1] == ["finished", str(tmp_path / "example_1.py") + ":smoothed"]
    launched = Run.open(tmp_path / "runs/smoothed")
    assert launched.history.facts["launch"]["num_processes"] == 2
    assert said[2][0] == "1"
    # The same on one process, by the file that the run names.
    alone = train(launched.recipe, f"output.dir={tmp_path / 'alone'}", quiet=True)
    assert np.allclose(alone.metrics["loss"], launched.metrics["loss"], rtol=1e-6)


def test_a_script_is_run_once(tmp_path: Path, quick_python: str) -> None:
    """Without a guard, whether its functions are handed over or named: to plan, too, nobody imports it again."""
    tree = language_model(tmp_path, data={"train": [{"sample": 40}], "sequence_length": 32, "cache_dir": "cache"})
    (tmp_path / "mine.py").write_text(
        f"""import json, finetune, torch
print("runs")
def loss(network, batch):
    logits = finetune.causal_lm_logits(network, batch).float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum")
tree = json.loads({json.dumps(tree)!r})
print(finetune.train(tree, quiet=True, loss=loss).recipe.task.loss)
for name in ("mine.py:loss", "mine:loss"):
    print(finetune.train(tree, "output.overwrite=true", f"task.loss={{name}}", quiet=True).status)
"""
    )
    done = subprocess.run(
        [quick_python, "mine.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["runs", f"{tmp_path / 'mine.py'}:loss", "finished", "finished"]


def test_a_script_that_starts_a_run_when_it_is_imported_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import finetune\ndef loss(network, batch): ...\nfinetune.launch({}, 'single')\n")
    with pytest.raises(RecipeError, match=r"mine\.py starts a run when it is imported.* below `if __name__ == "):
        import_object(f"{tmp_path / 'mine.py'}:loss", "task.loss")
    assert import_object("json:loads", "task.loss") is json.loads


def test_a_launch_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    with pytest.raises(LaunchError, match=r"^optim\.name: 'nonesuch' is no optimiser"):
        launch(mlp(tmp_path / "run"), "single", "optim.name=nonesuch", quiet=True)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="holds no run"):
        Run.open(tmp_path)
    with pytest.raises((RecipeError, CheckpointError), match=str(tmp_path)):
        Run.open(tmp_path / "nothing")


# ---------------------------------------------------------------- what is public


def test_all_that_is_public_is_there_and_typed() -> None:
    for name, module in finetune._MODULE_OF.items():
        assert getattr(finetune, name).__module__.startswith((module, "typing", "collections")), name
    assert set(finetune._MODULE_OF) <= set(dir(finetune))
    with pytest.raises(AttributeError, match="no attribute 'nonesuch'"):
        finetune.nonesuch  # noqa: B018
    for function in (load_recipe, train, start, launch, Run.open):
        assert function.__doc__
        assert "return" in function.__annotations__
    assert {*api._NAMED, *api._WRITTEN, "metrics"} == set(api.Objects.__annotations__)


def test_importing_it_is_light() -> None:
    kinds = "from finetune.tasks.task_lookup import BUILT_IN; [task.rows for task in BUILT_IN.values()]"
    said = subprocess.run(
        [sys.executable, "-c", f"import sys, finetune; finetune.load_recipe('sample'); {kinds}; print(*sys.modules)"],
        env={**os.environ, **environment()},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert not {"torch", "transformers", "accelerate", "datasets"} & set(said)

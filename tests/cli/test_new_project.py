"""`finetune init`: what it writes runs as it is, and it overwrites nothing."""

import json
from pathlib import Path

import pytest
import testdata
import yaml
from forkserver import ForkServer
from harness import ROOT, environment

from finetune.cli import new_project
from finetune.cli.main import main
from finetune.cli.new_project import Project, write_project
from finetune.cli.recipe_verbs import TASKS
from finetune.config import recipe_paths
from finetune.config.recipe import load_recipe, validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.distributed.gpu_specs import Gpu
from finetune.distributed.launch.deepspeed_file import find_deepspeed_file
from finetune.distributed.launch.launch_file import read_launch_file
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.resolve_config import derive_accumulation, resolve_for_devices
from finetune.planning.step_time import Machines
from finetune.utils.errors import DataError, RecipeError
from finetune.utils.shipped_files import RECIPES, shipped_names


# The others are written as `dpo` is.
@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("orpo", "simpo", "cpo")])
def test_a_new_project_trains(task: str, tmp_path: Path, fork_server: ForkServer) -> None:
    lines = write_project(tmp_path / "project", Project(task))
    command = lines[-1].split()
    assert command[:3] == ["finetune", "launch", "--config_file"]
    folder = tmp_path / "project"
    assert (folder / "accelerate_configs" / f"{command[3]}.yaml").is_file()
    words = ["-m", "finetune.training", command[4], "length={steps: 2}", "data.cache_dir=.cache"]
    words += ["data.train.0.sample=300"] * (task != "custom")
    code, output = fork_server.run(words, cwd=folder, env=environment())
    assert code == 0, output[-3000:]
    recipe = load_recipe(folder / "recipe.yaml")
    assert (folder / recipe.output.dir / "model").is_dir()
    readme = (folder / "README.md").read_text()
    assert recipe.output.dir in readme
    for verb, of in (("eval", ("classify",)), ("predict", ("classify", "reward"))):
        assert (f"finetune {verb} {recipe.output.dir}" in readme) == (task in of)
    assert (f"finetune generate {recipe.output.dir}" in readme) == (task in ("lm", "chat", "dpo", "kto"))


@pytest.mark.parametrize("record", [{"text": "A cat."}, {"prompt": "A cat?", "completion": "A dog."}, None])
@pytest.mark.parametrize("model", [None, testdata.MODEL])
def test_a_project_with_a_teacher(record: dict[str, str] | None, model: str | None, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text((json.dumps(record) + "\n") * 50)
    given = ["--task", "distill", "--teacher", testdata.MODEL, *(["--data", str(data)] if record is not None else [])]
    assert main(["init", str(tmp_path / "project"), *given, *(["--model", model] if model is not None else [])]) == 0
    recipe = load_recipe(tmp_path / "project" / "recipe.yaml")
    assert recipe.task.name == "distill"
    assert recipe.frozen_models["distillation.teacher"].name == testdata.MODEL
    assert (recipe.chat is not None) == (record is not None and "prompt" in record)
    assert (recipe.tokenizer.name or recipe.model.name) == testdata.MODEL


@pytest.mark.parametrize("given", [["--task", "distill"], ["--teacher", testdata.MODEL]])
def test_a_teacher_belongs_to_distillation(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "project", *given]) != 0
    assert "go together" in capsys.readouterr().err


def _readme_recipe() -> Recipe:
    text = (ROOT / "README.md").read_text().partition("## QLoRA of a Llama")[2]
    return validate_recipe(yaml.safe_load(text.split("```yaml\n")[1].split("```")[0]))


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_our_own_recipes_run_on_any_of_our_launch_files(processes: int, tmp_path: Path) -> None:
    """Only the launch file changes: README's recipe, those that ship, and what `init` and `sft` write."""
    recipes = {"README": _readme_recipe()}
    for name in shipped_names(RECIPES):
        recipes[name] = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    for task in TASKS:
        write_project(tmp_path / task, Project(task))
        recipes[task] = load_recipe(tmp_path / task / "recipe.yaml")
    for documents in (150, 400):
        data = tmp_path / f"{documents}.jsonl"
        rows = (json.dumps({"prompt": f"{n} cats? " * 20, "completion": "A cat."}) for n in range(documents))
        data.write_text("\n".join(rows))
        write_project(tmp_path / f"chat-{documents}", Project("chat", str(testdata.MODEL), str(data), "lora"))
        recipes[f"chats of {documents}"] = load_recipe(tmp_path / f"chat-{documents}" / "recipe.yaml")
    for name, recipe in recipes.items():
        for file in ("single",) if processes == 1 else ("ddp", "fsdp", "zero2", "zero3"):
            launch = launch_of_file(ROOT / "accelerate_configs" / f"{file}.yaml", processes)
            settled = resolve_for_devices(recipe, launch, processes, {})
            assert settled.micro_size <= recipe.batch.rows, name
            rows = settled.micro_size * settled.accumulation * processes
            assert rows == recipe.batch.global_size or recipe.length.steps == 0, name


@pytest.mark.parametrize("adapters", ["lora", "qlora"])
def test_a_project_of_a_pretrained_model(adapters: str, tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"text": "A cat."}\n' * 50)
    write_project(tmp_path / "project", Project("lm", str(testdata.MODEL), str(data), adapters))
    recipe = load_recipe(tmp_path / "project" / "recipe.yaml")
    assert recipe.model.name == str(testdata.MODEL)
    assert recipe.lora is not None
    assert recipe.model.quantization == ("nf4" if adapters == "qlora" else None)
    assert [source.path for source in recipe.data.train] == [str(data)]


def test_relative_paths_count_from_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands are given there, and `init` is given anywhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"text": "A cat."}\n')
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small").symlink_to(testdata.MODEL)
    project = Project("lm", "models/small", "*.jsonl")
    write_project(Path("projects/cats"), project)
    monkeypatch.chdir("projects/cats")
    recipe = load_recipe("recipe.yaml")
    recipe_paths.check_paths(recipe)
    assert recipe.model.name == "../../models/small"
    assert [source.path for source in recipe.data.train] == ["../../*.jsonl"]
    monkeypatch.chdir(tmp_path)
    write_project(Path(), project)
    assert load_recipe("recipe.yaml").model.name == "models/small"


def test_data_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"There is no file mine\.jsonl"):
        write_project(Path("project"), Project(data="mine.jsonl"))
    assert not (tmp_path / "project").exists()


def test_its_launch_files_can_be_read_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_project(tmp_path / "project", Project())
    monkeypatch.chdir("/")
    files = sorted((tmp_path / "project" / "accelerate_configs").glob("*.yaml"))
    assert {"single.yaml", "ddp.yaml", "fsdp.yaml", "zero2.yaml"} <= {file.name for file in files}
    for file in files:
        read_launch_file(str(file))
        config = (yaml.safe_load(file.read_text()).get("deepspeed_config") or {}).get("deepspeed_config_file")
        if config is not None:
            assert find_deepspeed_file(config, str(file)).is_relative_to(tmp_path)


@pytest.mark.parametrize("gpus", [1, 6, 8])
@pytest.mark.parametrize("task", ["lm", "custom"])
def test_the_batch_and_the_processes_fit_each_other(
    task: str, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machines(Gpu("a GPU", "", 79.0, 989.0, 450.0, 700.0), gpus, 1, 50.0, 0.4)
    monkeypatch.setattr(new_project, "this_machine", lambda: machine)
    *_, config, _ = write_project(tmp_path / "project", Project(task))[-1].split()
    written = yaml.safe_load((tmp_path / "project" / "accelerate_configs" / f"{config}.yaml").read_text())
    assert written["num_processes"] == gpus
    derive_accumulation(load_recipe(tmp_path / "project" / "recipe.yaml"), gpus)


def test_what_has_to_change_for_it_to_fit_stands_in_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machines(Gpu("a small GPU", "", 1.045, 100.0, 32.0, 300.0), 1, 1, 50.0, 0.4)
    monkeypatch.setattr(new_project, "this_machine", lambda: machine)
    command = write_project(tmp_path / "project", Project())[-1].split()
    assert "=" in command[-1]
    load_recipe(tmp_path / "project" / "recipe.yaml", command[5:])


def test_the_choice_follows_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machines(Gpu("too small", "", 0.0002, 1.0, 1.0, 100.0), 2, 1, 1.0, 0.4)
    monkeypatch.setattr(new_project, "this_machine", lambda: machine)
    with pytest.raises(RecipeError, match="On this machine"):
        write_project(tmp_path / "project", Project())
    assert not (tmp_path / "project").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=rf"Cannot write to {tmp_path}/file/project: Not a directory\. Free space"):
        write_project(tmp_path / "file" / "project", Project())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "recipe.yaml").write_text("mine")
    with pytest.raises(RecipeError, match=r"already holds recipe.yaml, README.md"):
        write_project(tmp_path, Project())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "recipe.yaml"]
    assert (tmp_path / "recipe.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("project", "says"),
    [
        (Project(adapters="lora"), "--lora trains adapters of a pretrained model"),
        (Project(adapters="qlora"), "--qlora trains adapters"),
        (Project("custom", model="x"), "leave --model and --data out"),
        (Project("custom", data="x"), "leave --model and --data out"),
    ],
)
def test_options_that_contradict_each_other(project: Project, says: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=says):
        write_project(tmp_path / "project", project)
    assert not (tmp_path / "project").exists()

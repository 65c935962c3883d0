"""`~` is the home directory in every path, whoever reads it, and nothing is ever made under that name."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic.fields import FieldInfo
from testdata import MODEL

from finetune.cli import main as cli
from finetune.config.recipe import load_recipe, validate_recipe
from finetune.config.recipe_schema import PathText, Recipe, section_in
from finetune.distributed.launch.deepspeed_file import find_deepspeed_file, read_deepspeed_file
from finetune.training import api

TINY = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 1, "num_key_value_heads": 1}
# Keys of a recipe that hold paths, or names that may be paths.
PATHS = {
    "chat.template",
    "data.cache_dir",
    "data.train.path",
    "data.validation.path",
    "distillation.teacher.name",
    "eval.metrics",
    "eval.prompts.path",
    "model.name",
    "optim.name",
    "output.dir",
    "preference.reference.name",
    "resume.mode",
    "task.loss",
    "task.name",
    "tokenizer.name",
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(tmp_path / "work")
    return folder


def holds_paths(annotation: Any) -> bool:
    rules = getattr(annotation, "__metadata__", ())
    return get_args(PathText)[1] in rules or any(map(holds_paths, get_args(annotation)))


def fields(section: Any, place: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        inner = section_in(field.annotation)
        if inner is None:
            yield f"{place}{name}", field
        else:
            yield from fields(inner, f"{place}{name}.")


def test_every_path_of_a_recipe_is_known() -> None:
    expands = {place for place, field in fields(Recipe) if holds_paths(field.rebuild_annotation())}
    assert expands == PATHS


def test_a_recipe_expands_them(home: Path) -> None:
    recipe = validate_recipe(
        {
            "model": {"name": "~/m"},
            "tokenizer": "~/t",
            "chat": {"template": "~/c.jinja"},
            "data": {"train": ["~/a.jsonl", {"path": "~/b*.jsonl"}], "validation": "~/v", "cache_dir": "~/cache"},
            "eval": {"prompts": "~/p.jsonl", "metrics": ["~/metric.py:f"]},
            "task": {"loss": "~/loss.py:f"},
            "output": "~/runs/x",
            "resume": "~/runs/y",
            "length": {"steps": 1},
        }
    )
    text = recipe.model_dump_json()
    assert "~" not in text
    assert text.count(str(home)) == 12


def test_a_run_with_all_of_it_makes_nothing_of_that_name(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "a.jsonl").write_text("".join(json.dumps({"text": f"{n} once upon a time"}) + "\n" for n in range(100)))
    tree = {"model": {"config": TINY}, "tokenizer": {"vocab_size": 300}, "length": {"steps": 1}}
    tree |= {"data": {"train": "~/a.jsonl", "cache_dir": "~/cache", "sequence_length": 16}, "output": "~/runs/x"}
    (home / "r.yaml").write_text(json.dumps({**tree, "batch": {"global_size": 2, "micro_size": 2}}))
    assert load_recipe(Path("~/r.yaml").expanduser()).output.dir == str(home / "runs" / "x")
    api.train("~/r.yaml", quiet=True)
    assert {path.name for path in home.iterdir()} == {"a.jsonl", "r.yaml", "runs", "cache"}
    assert cli.main(["generate", "~/runs/x", "--prompt", "a", "--max-new-tokens", "1"]) == 0
    assert cli.main(["eval", "~/runs/x", "--data", "~/a.jsonl"]) == 0
    assert cli.main(["export", "~/runs/x", "--as", "merged", "--to", "~/out"]) == 0
    assert cli.main(["audit", "~/runs/x"]) == 0
    assert cli.main(["runs", "~/runs"]) == 0
    assert cli.main(["data", "~/r.yaml"]) == 0
    assert cli.main(["init", "~/new", "--data", "~/a.jsonl"]) == 0
    again = ["model={name: ~/out}", "tokenizer=null", "output=~/runs/z"]
    api.train("~/r.yaml", *again, quiet=True)
    assert (home / "runs" / "z" / "model" / "config.json").is_file()
    assert list(Path.cwd().iterdir()) == []
    assert not list(home.rglob("~*"))
    assert "finished" in capsys.readouterr().out


def test_launch_files_and_what_they_name(home: Path) -> None:
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "~/swap"}}
    (home / "ds.json").write_text(json.dumps({"zero_optimization": zero}))
    (home / "launch.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: ~/ds.json}\n"
    )
    parsed = cli.build_parser().parse_args(["launch", "--config_file", "~/launch.yaml", "~/r.yaml"])
    assert parsed.config_file == str(home / "launch.yaml")
    assert parsed.recipe == str(home / "r.yaml")
    place, config = read_deepspeed_file("~/ds.json", parsed.config_file)
    assert place == str(home / "ds.json")
    assert config["zero_optimization"]["offload_param"]["nvme_path"] == str(home / "swap")
    assert find_deepspeed_file("~/ds.json", None) == home / "ds.json"


def test_prompts_and_names_are_no_paths(home: Path) -> None:
    words = ["generate", f"--base=~/b{os.sep}", str(MODEL), "--prompt", "~/x"]
    parsed = cli.parse_arguments(cli.build_parser(), words)
    assert parsed.prompt == "~/x"
    assert parsed.base == f"{home}/b/"
    words = ["plan", "r.yaml", "--links", "~/l.json", "--write=~/w.yaml", "--configs", "~/c", "--json"]
    parsed = cli.parse_arguments(cli.build_parser(), words)
    assert (parsed.links, parsed.write, parsed.configs) == ([f"{home}/l.json"], f"{home}/w.yaml", f"{home}/c")
    assert parsed.json is True

"""Runs over several machines are those of one process, whatever the backend and wherever its groups lie."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import Launcher, Result, assert_same_path, read_lines
from machines import Machine, Machines, Program, address
from ranks import PARAGRAPH, by_finetune, launch_file
from recipes_for_tests import SGD, base
from testdata import MODEL

pytestmark = [pytest.mark.machines, pytest.mark.xdist_group("machines_shapes")]

RECIPE = base(
    data={**base()["data"], "sequence_length": 64, "num_workers": 1},
    optim={**SGD, "clip_norm": 0.5, "args": {"momentum": 0.9}},
    schedule={"name": "constant", "warmup_steps": 0},
    length={"steps": 4},
    batch={"global_size": 8, "micro_size": 1},
    log={**base().get("log", {}), "system_every_s": 0.02},
)

# Each backend once, and two of them also in other shapes.
SHAPES = [
    ("ddp", 2, 1),
    ("zero2", 2, 1),
    *(("fsdp", *shape) for shape in ((2, 1), (2, 2), (4, 1))),
    *(("zero3", *shape) for shape in ((2, 1), (4, 1))),
    # Copies on different machines, and the shards of each on one.
    ("hsdp", 2, 2),
    # Layers split within a machine, and their parts sharded over machines.
    ("fsdp_tp", 2, 2),
]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines") / "own", 4) as made:
        yield made


@pytest.fixture(autouse=True)
def ended(machines: Machines) -> Iterator[None]:
    yield
    machines.kill_programs()


@pytest.fixture(scope="module")
def alone(launcher: Launcher) -> Result:
    return launcher.one("single", RECIPE)


def write_launch_file(folder: Path, name: str, number: int, each: int) -> Path:
    """A shipped launch file over some machines, the first of which is `m0`."""
    meeting = {"main_process_ip": address(0), "main_process_port": 29500, "same_network": True}
    tree = {**launch_file(name), "num_machines": number, "num_processes": number * each, **meeting}
    if "deepspeed_config" in tree:
        config = Path("ds_configs", tree["deepspeed_config"]["deepspeed_config_file"]).name
        tree["deepspeed_config"] |= {
            "deepspeed_multinode_launcher": "standard",
            "deepspeed_config_file": str(Path.cwd() / "ds_configs" / config),
        }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def start(machines: list[Machine], file: Path, recipe: Path, *words: str) -> list[Program]:
    """The same command on each machine, but for its number."""
    return [
        machine.start(by_finetune(file, "--machine_rank", str(machine.number), str(recipe), *words))
        for machine in machines
    ]


def write_recipe(folder: Path, output: Path | str, **sections: Any) -> Path:
    # A relative path is one of the machine's own.
    data = {**RECIPE["data"], "cache_dir": "cache"}
    tree = {**RECIPE, "data": data, "output": {"dir": str(output)}, **sections}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@pytest.mark.parametrize(("name", "number", "each"), SHAPES)
def test_machines_take_the_path_of_one_process(
    machines: Machines, alone: Result, tmp_path: Path, name: str, number: int, each: int
) -> None:
    used = machines[:number]
    caches = [machine.folder / "cache" for machine in used]
    recipe = write_recipe(tmp_path, tmp_path / "run")
    programs = start(used, write_launch_file(tmp_path, name, number, each), recipe)
    codes = [program.wait() for program in programs]
    printed = "\n".join(program.output for program in programs)
    assert codes == [0] * number, printed[-6000:]
    assert_same_path(alone, Result(0, printed, tmp_path / "run"), 2e-6)
    for machine in used:
        machine.wait_until_idle()
    facts = Result(0, printed, tmp_path / "run").facts
    assert facts["starts"][0]["processes"] == number * each
    assert facts["starts"][0]["host"] == "m0"
    assert all(list(cache.iterdir()) for cache in caches), "each machine prepares its own data"
    samples = read_lines(tmp_path / "run" / "machines.jsonl")
    sampled = {(sample["machine"], sample["host"]) for sample in samples}
    assert sampled <= {(machine.number, f"m{machine.number}") for machine in used}
    # About a hundred samples of each there.
    assert len(sampled) == number or number < 4


def test_a_run_directory_that_is_not_shared_is_refused_on_each_machine(machines: Machines, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "unshared")
    programs = start(machines[:2], write_launch_file(tmp_path, "ddp", 2, 1), recipe)
    for program in programs:
        assert program.wait() == 2, program.output
        said = PARAGRAPH.findall(program.output)
        assert said == [
            "Error: output.dir: unshared is not the same folder on all machines. Put it on a file system that they "
            "share."
        ]
        assert "Traceback" not in program.output


def test_machines_whose_copies_differ_train_nothing(machines: Machines, tmp_path: Path) -> None:
    """Three letters of the data, one bit of the base and a rule of the tokenizer on machine 1 are named on both."""
    data = {**RECIPE["data"], "cache_dir": "cache", "train": [{"path": "own.jsonl"}], "validation": []}
    recipe = write_recipe(tmp_path, tmp_path / "run", data=data, model={"name": "base"}, tokenizer={})
    for machine in machines[:2]:
        lines = [json.dumps({"text": f"Once upon a time there was a fox who had {n} friends."}) for n in range(400)]
        shutil.copytree(MODEL, machine.folder / "base")
        if machine.number == 1:
            lines[7] = lines[7].replace("fox", "cat")
            weights = machine.folder / "base" / "model.safetensors"
            content = bytearray(weights.read_bytes())
            content[-8] ^= 1
            weights.write_bytes(content)
            tokenizer = json.loads((machine.folder / "base" / "tokenizer.json").read_text())
            (machine.folder / "base" / "tokenizer.json").write_text(
                json.dumps({**tokenizer, "normalizer": {"type": "NFC"}})
            )
        (machine.folder / "own.jsonl").write_text("\n".join(lines))
    programs = start(machines[:2], write_launch_file(tmp_path, "ddp", 2, 1), recipe)
    for program in programs:
        assert program.wait() == 2, program.output
        assert PARAGRAPH.findall(program.output) == [
            "Error: The ranks do not start from the same inputs, and nothing was trained: machine 1 (m1) has other "
            "content than machine 0 (m0) in data.train.0, the tokenizer, the rows, model.safetensors. Copy the same "
            "files to every machine, and let nothing change them while a run starts."
        ]
    assert not (tmp_path / "run" / "run.json").exists()

"""A good recipe to spoil, and the ways to start two ranks on it and to look at how each of them ends."""

import itertools
import json
import os
import random
import re
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import testdata
import yaml
from harness import ROOT, command

from finetune.distributed import native_ops
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.training import entry_point
from finetune.utils.errors import BackendError

if TYPE_CHECKING:
    from forkserver import ForkServer

MODEL = Path(testdata.MODEL)
CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def lines(number: int) -> str:
    return "".join(json.dumps({"text": f"Story {i}. The cat {i} sat."}) + "\n" for i in range(number))


@dataclass(frozen=True)
class Place:
    """A folder with a good recipe, and the means to spoil it."""

    folder: Path
    fork_server: "ForkServer"

    def write(self, name: str, text: str | bytes) -> Path:
        file = self.folder / name
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    def recipe(self, **sections: Any) -> Path:
        tree = {
            "model": {"config": CONFIG},
            "tokenizer": {"name": str(MODEL)},
            "data": {
                "train": [{"path": str(self.folder / "train.jsonl")}],
                "validation_fraction": 0.0,
                "sequence_length": 32,
                "cache_dir": str(self.folder / "cache"),
                "num_workers": 1,
            },
            "batch": {"global_size": 4, "micro_size": 2},
            "length": {"steps": 2},
            "output": {"dir": str(self.folder / "run")},
            "precision": "fp32",
        }
        for name, values in sections.items():
            old = tree.get(name)
            tree[name] = {**old, **values} if isinstance(old, dict) and isinstance(values, dict) else values
        return self.write("recipe.yaml", yaml.safe_dump(tree))

    def launch_file(self, name: str, **keys: Any) -> Path:
        """A shipped launch file with some keys changed, one level down as well."""
        tree = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
        for key, value in keys.items():
            tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        return self.write("launch.yaml", yaml.safe_dump(tree))

    def ds_launch_file(self, changes: dict[str, Any]) -> Path:
        config = {**json.loads((ROOT / "ds_configs" / "zero2.json").read_text()), **changes}
        file = self.write("ds.json", json.dumps(config))
        return self.launch_file("zero2", deepspeed_config={"deepspeed_config_file": str(file)})

    def files(self) -> dict[str, bytes]:
        """Everything in the run directory but the lock, which says nothing of a run."""
        found = sorted((self.folder / "run").rglob("*"))
        return {str(f): f.read_bytes() for f in found if f.is_file() and f.name != ".lock"}


def exported(config: str | Path, processes: int | None = None) -> dict[str, str]:
    """What `accelerate launch` exports to each worker for a launch file, shipped or not."""
    from accelerate.commands import launch
    from accelerate.utils.launch import (
        prepare_deepspeed_cmd_env,
        prepare_multi_gpu_env,
        prepare_simple_launcher_cmd_env,
    )

    file = config if isinstance(config, Path) else ROOT / "accelerate_configs" / f"{config}.yaml"
    words = ["--main_process_port", "0", "--config_file", str(file)]
    words += [] if processes is None else ["--num_processes", str(processes)]
    arguments = launch.launch_command_parser().parse_args([*words, "scripts/train.py"])
    arguments, defaults, _ = launch._validate_launch_command(arguments)
    if arguments.num_processes == 1 and not (arguments.use_deepspeed or arguments.use_fsdp):
        env = prepare_simple_launcher_cmd_env(arguments)[1]
    elif arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        env = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = prepare_multi_gpu_env(arguments)
    return {key: value for key, value in env.items() if os.environ.get(key) != value}


def launch_file(config: str | Path) -> dict[str, Any]:
    """What a launch file says, shipped or not."""
    file = config if isinstance(config, Path) else ROOT / "accelerate_configs" / f"{config}.yaml"
    tree: dict[str, Any] = yaml.safe_load(file.read_text())
    return tree


def needed_ops(config: str | Path) -> list[str]:
    """The native ops of DeepSpeed that a launch file needs here, shipped or not; none if it is refused."""
    file = config if isinstance(config, Path) else ROOT / "accelerate_configs" / f"{config}.yaml"
    with suppress(BackendError):
        return native_ops.needed_ops(launch_of_file(file, launch_file(config)["num_processes"]))
    return []


_CANDIDATES = itertools.count(random.randrange(10_000))


def free_port() -> int:
    """A port on which nothing listens.

    It is below those that Linux hands out by itself (32768 and up): one of these may be another connection's by the
    time that rank 0 listens on it.
    """
    for number in _CANDIDATES:
        port = 20_000 + number % 9_000  # launch files and tutorials have 29,500 and 29,501
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port
    raise AssertionError  # there is always a next number


@dataclass(frozen=True)
class Rank:
    code: int
    stdout: str
    stderr: str


def start(
    place: Place,
    recipe: Path,
    *overrides: str,
    config: str | Path = "ddp",
    in_turn: bool = False,
    script: str = "scripts/train.py",
) -> list[Rank]:
    """Two ranks, in the environment that torchrun and Accelerate give them, each with its own exit code."""
    with place.fork_server.start(config, place.folder, recipe, *overrides, script=script, in_turn=in_turn) as ranks:
        codes = ranks.wait()
    folders = [place.folder / "elastic" / "attempt_0" / str(rank) for rank in range(len(codes))]
    texts = ([(folder / name).read_text() for name in ("out", "err")] for folder in folders)
    return [Rank(code, *text) for code, text in zip(codes, texts, strict=True)]


PARAGRAPH = re.compile(r"^Error: .*$", re.MULTILINE)


def assert_said(spoken: str, *says: str) -> None:
    """One paragraph, of one line, and nothing else but that a rank waits for another's data."""
    spoken = re.sub(r"^Waiting for another process .*\n", "", spoken, flags=re.MULTILINE)
    paragraphs = PARAGRAPH.findall(spoken)
    assert len(paragraphs) == 1, spoken[-4000:]
    assert spoken.strip() == paragraphs[0]
    for words in says:
        assert words in paragraphs[0]


def assert_refused(ranks: list[Rank], *says: str) -> None:
    """Each rank ends in exit code 2; between them they say one paragraph."""
    spoken = "".join(rank.stderr for rank in ranks)
    assert [rank.code for rank in ranks] == [2] * len(ranks), spoken[-4000:]
    assert_said(spoken, *says)


class Here:
    """Rank 0 of two inside this process, for what is refused before the ranks meet: no start to wait for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys
        monkeypatch.chdir(ROOT)
        for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_", "TORCHELASTIC_"))]:
            monkeypatch.delenv(key)

    def assert_refused(self, recipe: Path, *says: str, config: str | Path = "ddp") -> None:
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        for key, value in {**exported(config), **ranks}.items():
            self.monkeypatch.setenv(key, value)
        self.capsys.readouterr()
        assert entry_point.train_main([str(recipe)]) == 2
        assert_said(self.capsys.readouterr().err, *says)


def by_finetune(config: str | Path, *arguments: str) -> list[str]:
    """`finetune launch` of a shipped launch file by name, or of any by path."""
    code = "import sys; from finetune.cli.main import main; raise SystemExit(main(sys.argv[1:]))"
    file = config if isinstance(config, Path) else f"accelerate_configs/{config}.yaml"
    return [sys.executable, "-c", code, "launch", "--config_file", str(file), *arguments]


def by_launcher(config: str | Path, *arguments: str, module: str) -> list[str]:
    """What `finetune launch` becomes once recipe and launch file are checked; of any module as the worker."""
    words = command(config, *arguments, script=module)
    at = words.index(module)
    launch = words[words.index("launch") + 1 : at]
    return [sys.executable, "-m", "finetune.distributed.launch.launcher", *launch, "--module", *words[at:]]

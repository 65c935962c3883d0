"""Trains, reads state, writes it anew and reads it again, on several backends one after the other in one launch.

Launched with a folder and a file of jobs; writes what held into `FOLDER/NAME.json`, and each job's state, rank by
rank, below `FOLDER/CASE/CONFIG-RANKS/`.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from peft import LoraConfig, get_peft_model
from ranks import exported
from recipes_for_tests import base
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers.integrations import deepspeed

from finetune.config.recipe_schema import Recipe
from finetune.distributed.backend import Backend
from finetune.distributed.launch.launch_config import read_launch
from finetune.distributed.resolve_config import resolve_config
from finetune.models.build_network import build_model
from finetune.models.forward_wrapper import ForwardWrapper, unwrap
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.optim.optimizers import build_optimizer
from finetune.utils import exit_codes
from finetune.utils.errors import CheckpointError
from finetune.utils.library_imports import silence_libraries

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
VOCABULARY, LENGTH, ROWS = 101, 16, 4
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
ADAMW = {"name": "AdamW", "lr": 1e-2}
SGD = {"name": "SGD", "lr": 0.1, "args": {"momentum": 0.9}}
# Model, and optimiser; a wide one for the disk, which takes shards of more than a MiB.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, ADAMW),
    "tied": ({**LLAMA, "tie_word_embeddings": True}, SGD),
    "lora": (LLAMA, ADAMW),
    "odd": (LLAMA, ADAMW),
    "wide": ({**LLAMA, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1}, ADAMW),
}
Tensors = dict[str, torch.Tensor]


class Odd(nn.Module):
    """Shapes that no number of ranks divides, a frozen parameter, and one that never has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 7)
        self.inner = nn.Linear(7, 5)
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, VOCABULARY)
        self.head.bias.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(ids)).tanh() * self.one)


@dataclass
class Trained:
    """A prepared model and optimiser, and how to train, read and write them."""

    backend: Backend
    model: nn.Module
    optimizer: Any

    @property
    def network(self) -> nn.Module:
        return unwrap(self.model)

    def steps(self, numbers: range) -> None:
        backend = self.backend
        for number in numbers:
            ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))
            mine = ids.reshape(backend.world_size, -1, LENGTH)[backend.rank]
            loss = self.model(loss_sum, mine)
            backend.accelerator.backward(loss * (backend.world_size / (ROWS * (LENGTH - 1))))
            backend.clip(self.model, 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def look(self) -> float:
        """The loss without a gradient; where weights are gathered for it, they may stay so."""
        with torch.no_grad():
            return float(self.model(loss_sum, torch.arange(LENGTH).reshape(1, -1)))

    def read(self, keep: Callable[[str], bool] = lambda _: True) -> Tensors:
        # All ranks gather all, in step.
        wholes = ((key, piece.gather()) for key, piece in self.backend.read_state(self.network, self.optimizer))
        return {key: whole.clone() for key, whole in wholes if keep(key.partition("/")[2])}

    def write(self, keys: list[str], load: Callable[[str], torch.Tensor]) -> None:
        self.backend.write_state(self.network, self.optimizer, keys, load)


def loss_sum(network: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = network(ids)
    logits = (out if isinstance(out, torch.Tensor) else out.logits).float()
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def build(config: str, case: str, *, seed: int = 1, optimizer: dict[str, Any] | None = None) -> Trained:
    """As the loop does, in the environment that a launch file makes."""
    # Accelerate keeps its state for the life of a process; the process group can stay.
    gc.collect()
    deepspeed.unset_hf_deepspeed_config()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    ours = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
    for key in [key for key in os.environ if key.startswith(ours)]:
        del os.environ[key]
    path = Path(config) if config.endswith(".yaml") else config
    os.environ |= {key: value for key, value in exported(path).items() if key.startswith(ours)}
    if "PARALLELISM_CONFIG_DP_SHARD_SIZE" in os.environ:
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(WORLD // 2)
    values, default = CASES[case]
    precision = "bf16" if "bf16" in config else "fp32"
    recipe = Recipe.model_validate(
        base(
            model={"config": values},
            optim=optimizer or default,
            batch={"global_size": ROWS, "micro_size": ROWS // WORLD},
            data={**base()["data"], "sequence_length": LENGTH},
            seed=seed,
            precision=precision,
        )
    )
    asked = read_launch()
    backend = Backend.start(recipe, asked, resolve_config(recipe, asked), quiet=True)
    with backend.loading(pretrained=False):
        torch.manual_seed(seed)
        network = Odd() if case == "odd" else build_model(recipe, resolve_model_config(recipe), NEXT_TOKEN)
    if case == "lora":
        network = get_peft_model(network, LoraConfig(r=3, target_modules=["q_proj", "o_proj"]))
    caller = ForwardWrapper(network.train())
    caller.autocast = backend.autocast
    return Trained(backend, *backend.prepare(caller, build_optimizer(caller, recipe)))


def difference(have: Tensors, want: Tensors) -> str:
    """The first key that differs in any bit, dtype or shape; empty if none does."""
    for key in want | have:
        if key not in have or key not in want:
            return f"{key} is in one only"
        left, right = have[key], want[key]
        if (left.dtype, left.shape) != (right.dtype, right.shape):
            return f"{key}: {left.dtype} {tuple(left.shape)}, not {right.dtype} {tuple(right.shape)}"
        if not torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right))):
            return f"{key} differs by {(left - right).abs().max():.1e}"
    return ""


class Files:
    """A state in files, one a rank that wrote it."""

    def __init__(self, folder: Path) -> None:
        self.files = [safe_open(path, "pt") for path in sorted(folder.glob("*.safetensors"))]
        self.where = {key: file for file in self.files for key in file.keys()}  # noqa: SIM118
        self.keys = list(self.where)

    def load(self, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self.where[key].get_tensor(key)
        return tensor


def negative(load: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    return lambda key: load(key) if key.startswith("step/") else -load(key)


def make(folder: Path, config: str, case: str) -> Iterator[tuple[str, str]]:
    """Trains six steps; then again from the state after three, which is kept in files."""
    first = build(config, case)
    yield "fresh", difference({k: t for k, t in first.read().items() if not k.startswith("parameter/")}, {})
    first.steps(range(3))
    if first.backend.launch.offload_optimizer == "nvme":
        yield "disk", "" if first.optimizer.optimizer._swappable_optimizer_subgroup(0) else "all rests in memory"
    first.look()
    rank, names = first.backend.rank, list(first.backend.sizes(first.network))
    owned = {name: index % WORLD == rank for index, name in enumerate(names)}
    mine = first.read(owned.__getitem__)
    place = folder / case / f"{Path(config).stem}-{WORLD}"
    place.mkdir(parents=True, exist_ok=True)
    save_file(mine, place / f"{rank}.safetensors")
    first.backend.barrier()
    third = first.read()
    loss = first.look()
    first.steps(range(3, 6))
    sixth = first.read()
    unused = {k for k in sixth if not k.startswith("parameter/") and "unused" in k}
    zeros = all(not sixth[k].any() for k in unused if not k.startswith("step/"))
    yield "unused", "" if zeros else "a parameter without gradients has state"
    changed = [k for k in third if torch.equal(third[k], sixth[k]) and "unused" not in k]
    yield "changes", "" if not changed else f"three more steps leave {changed[0]} as it was"
    del first
    # What is frozen is no state: it is made of the seed.
    second = build(config, case, seed=1 if case in ("lora", "odd") else 2)
    # An evaluation, or the proof at the start, may leave weights gathered.
    second.look()
    files = Files(place)
    second.write(files.keys, files.load)
    yield "read back", difference(second.read(), third)
    yield "loss", "" if second.look() == loss else "the network computes with other weights"
    second.steps(range(3, 6))
    yield "goes on", difference(second.read(), sixth)


def cross(folder: Path, config: str, case: str) -> Iterator[tuple[str, str]]:
    """Writes what every backend left of a case into this one."""
    trained = build(config, case, seed=2)
    for place in sorted((folder / case).iterdir()):
        files = Files(place)
        # Backends agree in nearly every bit, so that a write that does nothing would not be seen.
        trained.write(files.keys, negative(files.load))
        trained.write(files.keys, files.load)
        want = {key: files.load(key) for key in files.keys}
        have = trained.read()
        # Flat buffers have state of all their parameters.
        for key in [key for key in have if key not in want and "unused" in key and not key.startswith("step/")]:
            assert not have.pop(key).any()
        yield f"from {place.name}", difference({k: t for k, t in have.items() if k in want or "unused" not in k}, want)
    trained.write([key for key in files.keys if key.startswith("parameter/")], files.load)
    trained.steps(range(1))
    yield "steps", "" if trained.look() < 1e4 else "does not train"


def refuse(folder: Path, config: str, case: str) -> Iterator[tuple[str, str]]:
    """What each spoilt state is refused with; the report holds the messages."""
    trained = build(config, case, seed=2)
    trained.steps(range(1))
    good = trained.read()
    name = "model.norm.weight"

    def message(**changes: torch.Tensor | None) -> str:
        changed = {k.replace("__", "/").replace("_DOT_", "."): t for k, t in changes.items()}
        bad = {k: t for k, t in {**good, **changed}.items() if t is not None}
        try:
            trained.write(list(bad), bad.__getitem__)
        except CheckpointError as error:
            return str(error)
        return "written"

    yield "missing", message(**{f"parameter/{name}": None})
    yield "unexpected", message(**{"parameter/more.weight": torch.zeros(2)})
    yield "unexpected state", message(**{"exp_avg/more.weight": torch.zeros(2)})
    yield "shape", message(**{f"parameter/{name}": torch.zeros(33)})
    yield "dtype", message(**{f"parameter/{name}": good[f"parameter/{name}"].bfloat16()})
    yield "state shape", message(**{f"exp_avg/{name}": torch.zeros(33)})
    yield "state incomplete", message(**{f"exp_avg/{name}": None})
    yield "step", message(**{f"step/{name}": torch.tensor(7.0)})
    yield "good", message()


def main(name: str, folder: Path, jobs: list[list[str]]) -> None:
    silence_libraries()
    report: dict[str, str] = {}
    for kind, config, case in jobs:
        does = {"make": make, "cross": cross, "refuse": refuse}[kind]
        for what, problem in does(folder, config, case):
            report[f"{Path(config).stem} {case} {kind}: {what}"] = problem
    if WORLD > 1:
        # A rank that differs alone must be heard.
        every: list[Any] = [None] * WORLD
        torch.distributed.all_gather_object(every, report)
        report = {key: max(part[key] for part in every) for key in report}
    if int(os.environ.get("RANK", "0")) == 0:
        (folder / f"{name}.json").write_text(json.dumps(report, indent=1))
    if WORLD > 1:
        torch.distributed.destroy_process_group()
    exit_codes.exit_with(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text()))

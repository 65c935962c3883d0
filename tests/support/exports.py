"""Runs to export, in this process, and what a fresh process would do, in this one too."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from inside import run_here
from peft import PeftModel
from recipes_for_tests import MODEL, base, stories
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finetune.export import export_weights, fresh_process, verify_export
from finetune.models.forward_wrapper import unwrap
from finetune.utils.errors import CheckpointError

IDS = torch.arange(3, 3 + 2 * 30).reshape(2, 30)


@dataclass(frozen=True)
class Trained:
    """A run's directory, and what its network said when it ended."""

    directory: Path
    logits: torch.Tensor
    loss: float


def tree_of(directory: Path, sections: dict[str, Any]) -> dict[str, Any]:
    """A recipe of three steps."""
    tree = base(
        data={"train": stories("train", limit=60), "validation": stories("validation", limit=6), "sequence_length": 64},
        length={"steps": 3},
        checkpoint={"every_steps": 2},
        output={"dir": str(directory / "run")},
        **{key: value for key, value in sections.items() if key != "model"},
    )
    tree["model"] = {"name": MODEL, **sections.get("model", {})}
    return tree


def train(directory: Path, sections: dict[str, Any]) -> Trained:
    kept: list[Any] = []
    done = run_here(tree_of(directory, sections), kept.append)
    network = unwrap(kept[0].model).eval()
    with torch.no_grad():
        logits = network(input_ids=IDS).logits
    return Trained(done.directory, logits, done.results["validation_loss"])


def opened_here(folder: Path, probe: verify_export.Probe, about: dict[str, Any]) -> dict[str, Any]:
    """In place of `verify_export.open_in_fresh_process`: starting another process would take most of a test's time."""
    with tempfile.TemporaryDirectory() as place:
        save_file(probe.tensors, f"{place}/tensors.safetensors")
        ask = {"folder": str(folder), "place": place}
        try:
            return fresh_process.compare({**ask, "options": probe.options, **about})
        except Exception as error:
            raise CheckpointError(f"A fresh process cannot open {folder}: {error}") from error


def exported(run: Path, kind: str, to: Path, **options: Any) -> tuple[Path, str]:
    said: list[str] = []
    return export_weights.export_weights(run, kind, said.append, to=to / kind, **options), "\n".join(said)


def logits_of(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, str(adapter))
    with torch.no_grad():
        return network.eval()(input_ids=IDS).logits


def change(folder: Path, act: Callable[[dict[str, torch.Tensor]], Any], name: str = "model.safetensors") -> None:
    """Changes the tensors of a file."""
    tensors = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
    act(tensors)
    save_file(tensors, folder / name, {"format": "pt"})

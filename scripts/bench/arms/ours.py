"""This toolkit, as users run it: a recipe, the built-in task, `train()` with its log, guard and ledger.

Two things are done from outside: `train_step` is held at its boundary, and the data are the rows that all arms read.
"""

import shutil
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.arms import preferences
from bench.arms.adapters import equal_adapters
from bench.cases import AS_TEXTS, DPO
from bench.gate import Gate
from bench.spec import BETAS, CLIP, LR, Spec
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import Recipe
from finetune.data.rows.row_order import rows_at
from finetune.models.forward_wrapper import unwrap
from finetune.tasks import causal_lm, task_lookup
from finetune.tasks.task import TaskData
from finetune.training import loop
from finetune.training.build_run import build_run
from finetune.training.built_run import BuiltRun


class EqualRows:
    """The rows, such that the order in which the loop reads them is the one in which they lie in the file."""

    def __init__(self, rows: np.ndarray, seed: int) -> None:
        self._rows, self._seed = rows, seed

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """As `tasks.Rows` has it; the last token of a row predicts nothing, as with the other arms."""
        inputs = torch.from_numpy(self._rows[self._position[rows]])
        targets = torch.full_like(inputs, -100)
        targets[:, :-1] = inputs[:, 1:]
        return {"input_ids": inputs, "targets": targets}

    def num_targets(self, rows: np.ndarray) -> int:
        """As `tasks.Rows` has it."""
        return len(rows) * int(self._rows.shape[1] - 1)

    @cached_property
    def _position(self) -> np.ndarray:
        positions = np.arange(len(self._rows))
        found = np.empty_like(positions)
        found[rows_at(positions, num_rows=len(self._rows), seed=self._seed)] = positions
        return found


def recipe_of(spec: Spec) -> Recipe:
    """The recipe that takes a case's steps."""
    case = spec.case
    tree: dict[str, Any] = {
        "model": {"name": spec.model},
        "data": {"train": [{"sample": 8}], "sequence_length": case.length, "packing": "wrapped"},
        "batch": {"global_size": case.rows, "micro_size": spec.micro},
        "length": {"steps": spec.steps + 1},
        "optim": {"lr": LR, "weight_decay": 0.0, "clip_norm": CLIP, "args": {"betas": list(BETAS)}},
        "schedule": {"name": "constant"},
        "precision": case.precision,
        "output": {"dir": spec.folder + "/run", "save_model": False},
        "checkpoint": {"every_minutes": None, "at_end": False},
    }
    if case.kind == DPO:
        tree |= preferences.recipe_keys(spec)
    elif case.kind != "full":
        tree["lora"] = {"rank": 16, "alpha": 32.0, "dropout": 0.0}
    if case.kind == "qlora":
        tree["model"] |= {"quantization": "nf4", "double_quantization": True}
    return validate_recipe(tree)


def run(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn."""
    from transformers import AutoTokenizer

    def equal_rows(recipe: Recipe, quiet: bool) -> TaskData:
        rows = EqualRows(spec.load_rows(), recipe.seed)
        return TaskData(
            train=rows, tokenizer=AutoTokenizer.from_pretrained(spec.model), digest=f"equal rows {spec.spoil}"
        )

    step_of = loop.train_step

    def held(run: BuiltRun, step: int) -> Any:
        gate.before_step()
        taken = step_of(run, step)
        # Of ranks that share rows or layers, what is whole counts once.
        rows = sum(len(part) for part in taken.rows) if run.backend.mesh.counts_rows else 0
        loss = taken.losses.sum()
        targets = rows * spec.case.targets_of_row
        gate.add(loss if run.backend.mesh.counts_loss else torch.zeros_like(loss), targets)
        gate.norm(taken.norm.read()[0])
        return taken

    if spec.arm == AS_TEXTS:
        task_lookup.BUILT_IN["dpo"] = task_lookup.BUILT_IN["dpo"]._replace(place="bench.arms.preferences:as_texts")
    elif spec.case.kind != DPO:
        causal_lm.CAUSAL_LM = replace(causal_lm.CAUSAL_LM, build_data=equal_rows)
    loop.train_step = held
    shutil.rmtree(Path(spec.folder) / "run", ignore_errors=True)
    built = build_run(recipe_of(spec))
    if spec.case.kind in ("lora", "qlora"):
        equal_adapters(unwrap(built.model))
    loop.train(built)

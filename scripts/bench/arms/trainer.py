"""Hugging Face's Trainer and TRL's SFTTrainer, held at their step's boundary by a callback.

`trainer` and `trl` run in their defaults, but for what has to be equal; `trl-best` without gradient checkpointing.
"""

from typing import Any

import torch
from transformers import AutoTokenizer, DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from bench.arms.adapters import adapted, load
from bench.gate import Gate
from bench.spec import CLIP, LR, Spec


class Boundary(TrainerCallback):  # type: ignore[misc]
    """Stops the loop until it is this arm's turn."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Before a step's first forward pass; its batches have been read."""
        self._gate.before_step()


def run(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn."""
    from datasets import Dataset

    case = spec.case
    data = Dataset.from_dict({"input_ids": spec.load_rows().tolist()})
    model = load(spec.model, case.kind, case.precision)
    if case.kind != "full":
        model = adapted(model)
    tokenizer = AutoTokenizer.from_pretrained(spec.model)
    shared = shared_arguments(spec)
    if spec.arm == "trainer":
        collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
        trainer = Trainer(model, TrainingArguments(**shared), train_dataset=data, data_collator=collator)
    else:
        from trl import SFTConfig, SFTTrainer

        best = {"gradient_checkpointing": False, "logging_steps": 500} if spec.arm == "trl-best" else {}
        settings = SFTConfig(**shared, max_length=case.length, **best)
        trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    trainer.add_callback(Boundary(gate))
    watch(trainer, gate, case.rows * (case.length - 1))
    trainer.train()


def shared_arguments(spec: Spec) -> dict[str, Any]:
    """The arguments of any trainer."""
    case = spec.case
    return {
        "output_dir": spec.folder,
        "per_device_train_batch_size": spec.micro,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": spec.steps + 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": CLIP,
        "bf16": case.precision == "bf16",
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "report_to": "none",
    }


def watch(trainer: Any, gate: Gate, targets: int) -> None:
    """Has the gate told losses and norms, which are read when the turn is over."""
    training_step, clip = trainer.training_step, trainer._clip_grad_norm
    accumulation = trainer.args.gradient_accumulation_steps

    def noted(*args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = training_step(*args, **kwargs)
        # Divided by the targets of the whole step already.
        gate.add(loss * targets, targets // accumulation)
        return loss

    def clipped(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        gate.norm(norm)
        return norm

    trainer.training_step, trainer._clip_grad_norm = noted, clipped

"""A plain script with HF Trainer, of the kind that people start from; it marks the end of its first step."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from datasets import load_from_disk
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))


class Mark(TrainerCallback):  # type: ignore[misc]
    """Says that the first step has been taken."""

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Writes the file that is waited for."""
        Path(spec["mark"]).write_text("first step\n", encoding="utf-8")


if os.environ.get("ACCELERATE_USE_FSDP") == "true":
    # Accelerate takes its FSDP branch for process groups of GPUs only: this opens it on gloo.
    state = PartialState(cpu=True)
    state.distributed_type, state.device = DistributedType.MULTI_GPU, torch.device("cpu")
tokenizer = AutoTokenizer.from_pretrained(spec["model"])
data = load_from_disk(spec["tokens"])
arguments = TrainingArguments(
    output_dir=spec["folder"] + "/out",
    per_device_train_batch_size=4 // int(os.environ.get("WORLD_SIZE", "1")),
    max_steps=100,
    learning_rate=1e-3,
    use_cpu=True,
    save_strategy="no",
    report_to="none",
)
Trainer(
    AutoModelForCausalLM.from_pretrained(spec["model"]),
    arguments,
    train_dataset=data,
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[Mark()],
).train()

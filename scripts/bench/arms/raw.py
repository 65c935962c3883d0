"""One part of `raw text`: an epoch over a file of stories, from text to the last step. `raw.py SPEC.json` says what
it took on its last line.

Imports are not in the time; reading the model is, for all. Every arm learns the same tokens, each once.
"""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).resolve().parent]

LR = 1e-3


def main() -> None:
    """Runs the arm that the file names."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    arm = {"ours": ours, "trainer": trainer, "trl-best": trl}[spec["arm"]]
    figures = arm(spec)
    print(json.dumps(figures), flush=True)
    os._exit(0)


def ours(spec: dict[str, Any]) -> dict[str, float]:
    """A recipe with packed documents."""
    from finetune.config.recipe import validate_recipe
    from finetune.tasks import causal_lm
    from finetune.training import loop
    from finetune.training.build_run import build_run

    spent: dict[str, float] = {}
    build_data = causal_lm.CAUSAL_LM.build_data

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        ready = build_data(*args)
        spent["prepare_s"] = time.perf_counter() - began
        return ready

    def marked(run: Any, step: int) -> Any:
        taken = step_of(run, step)
        spent["last"], spent["cpu_s"] = time.perf_counter(), cpu_seconds()
        return taken

    step_of = loop.train_step
    causal_lm.CAUSAL_LM, loop.train_step = replace(causal_lm.CAUSAL_LM, build_data=timed), marked
    recipe = validate_recipe(
        {
            "model": {"name": spec["model"]},
            "data": {
                "train": [{"path": spec["stories"]}],
                "validation_fraction": 0.0,
                "sequence_length": spec["length"],
                "add_bos": False,
                "cache_dir": spec["folder"] + "/cache",
            },
            "batch": {"global_size": spec["packed_rows"], "micro_size": spec["packed_rows"]},
            "length": {"epochs": 1},
            "optim": {"lr": LR, "weight_decay": 0.0, "args": {"betas": [0.9, 0.999]}},
            "schedule": {"name": "constant"},
            "precision": spec["precision"],
            "eval": {"at_end": False},
            "output": {"dir": spec["folder"] + "/run", "save_model": False},
            "checkpoint": {"every_minutes": None, "at_end": False},
        }
    )
    began, before = time.perf_counter(), cpu_seconds()
    run = build_run(recipe)
    stepping = time.perf_counter()
    loop.train(run)
    ended, last = time.perf_counter(), spent.pop("last")
    spent["cpu_s"] -= before
    return {
        **spent,
        "steps_s": last - stepping,
        "total_s": last - began,
        "end_s": ended - last,
        "useful": run.state.tokens.item(),
        "steps": run.length.num_steps,
        "loss": run.results["train_loss"],
    }


def trainer(spec: dict[str, Any]) -> dict[str, float]:
    """HF Trainer, each story a row, padded to the longest of its batch: as its own examples do it."""
    from datasets import load_dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
    )

    began, before = time.perf_counter(), cpu_seconds()
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = load_dataset("json", data_files=spec["stories"], split="train", cache_dir=spec["folder"] + "/cache")

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        texts = [text + tokenizer.eos_token for text in batch["text"]]
        return dict(tokenizer(texts, truncation=True, max_length=spec["length"]))

    data = data.map(encode, batched=True, remove_columns=data.column_names)
    prepared = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype="float32")
    arguments = TrainingArguments(**_arguments(spec), per_device_train_batch_size=spec["padded_rows"])
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    one = Trainer(model, arguments, train_dataset=data, data_collator=collator)
    return _epoch(one, began, before, prepared)


def trl(spec: dict[str, Any]) -> dict[str, float]:
    """TRL at its best: packed by best fit, no gradient checkpointing; rows of a step one after the other.

    It joins the rows of a micro-batch into one, whose dense mask grows with the square of its length.
    """
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    began, before = time.perf_counter(), cpu_seconds()
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    data = load_dataset("json", data_files=spec["stories"], split="train", cache_dir=spec["folder"] + "/cache")
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype="float32")
    settings = SFTConfig(
        **_arguments(spec),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=spec["packed_rows"],
        gradient_checkpointing=False,
        max_length=spec["length"],
        packing=True,
        packing_strategy="bfd_split",
        logging_steps=500,
    )
    one = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer)
    prepared = time.perf_counter()
    return _epoch(one, began, before, prepared)


def cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _arguments(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "output_dir": spec["folder"] + "/out",
        "num_train_epochs": 1,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": spec["precision"] == "bf16",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
    }


def _epoch(one: Any, began: float, cpu_before: float, prepared: float) -> dict[str, float]:
    """Trains, and counts the tokens that were learned."""
    from transformers import TrainerCallback

    training_step, labels, last = one.training_step, [], [0.0, 0.0]

    class Mark(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            last[:] = time.perf_counter(), cpu_seconds()

    def noted(model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        labels.append(inputs["labels"])
        return training_step(model, inputs, *args)

    one.training_step = noted
    one.add_callback(Mark())
    stepping = time.perf_counter()
    result = one.train()
    ended = time.perf_counter()
    return {
        "prepare_s": prepared - began,
        "steps_s": last[0] - stepping,
        "total_s": last[0] - began,
        "end_s": ended - last[0],
        "cpu_s": last[1] - cpu_before,
        "useful": sum(int((part[:, 1:] != -100).sum()) for part in labels),
        "steps": result.global_step,
        "loss": result.training_loss,
    }


if __name__ == "__main__":
    main()

"""Measures what full tuning, LoRA and QLoRA of the same Llama hold, each in a process of its own.

    python scripts/benchmark_memory.py --layers 2

The Llama has real width and random weights, stored in bf16. Prints a Markdown table in GiB: what the run reports at its
start, the peak of loading, the peak of two training steps, and the bytes that a linear weight of the base takes. What
the process held before it built anything is taken off. On a GPU its memory is measured, else that of the process.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from benchmark_save import memory, reset_peak
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.models.forward_wrapper import unwrap
from finetune.training.build_run import build_run
from finetune.training.loop import train_step
from finetune.utils.library_imports import silence_libraries

GIB = 2.0**30
LORA: dict[str, Any] = {"rank": 16, "alpha": 32, "targets": "all-linear"}
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": LORA},
    "qlora int8": {"lora": LORA, "quantization": "int8"},
    "qlora nf4": {"lora": LORA, "quantization": "nf4"},
}


def store(words: argparse.Namespace, folder: Path) -> None:
    """Writes the model."""
    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(
        hidden_size=words.width,
        intermediate_size=words.width * 43 // 16,  # 11,008 of 4,096, as in Llama-2-7B
        num_hidden_layers=words.layers,
        num_attention_heads=words.width // 128,
        vocab_size=32_000,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def recipe(words: argparse.Namespace, folder: Path, kind: str) -> dict[str, Any]:
    sections = dict(KINDS[kind])
    model = {"name": str(folder / "model"), "quantization": sections.pop("quantization", None)}
    return {
        "model": {**model, "gradient_checkpointing": True},
        **sections,
        "tokenizer": {"vocab_size": 512},
        "data": {"train": [{"sample": 200}], "sequence_length": words.length, "cache_dir": str(folder / "cache")},
        "batch": {"global_size": 1, "micro_size": 1},
        "length": {"steps": 2},
        "precision": "bf16",
        "output": {"dir": str(folder / kind.replace(" ", "-")), "overwrite": True},
    }


def linear_bytes(network: nn.Module) -> float:
    """Bytes a weight of the frozen linear modules but the head, all that belongs to them counted."""
    size = weights = 0.0
    for name, module in network.named_modules():
        own: Any = module
        if not name.endswith("base_layer"):
            continue
        state = getattr(getattr(own, "weight", None), "quant_state", None) if hasattr(own, "quant_state") else None
        scales = (
            [] if state is None else [state.absmax, state.code, state.state2.absmax, state.state2.code, state.offset]
        )
        size += sum(t.nbytes for t in (*own.parameters(), *own.buffers(), *scales))
        weights += own.in_features * own.out_features
    return size / weights if weights else float("nan")


def measure(words: argparse.Namespace, folder: Path, kind: str) -> dict[str, Any]:
    """Builds and trains one kind in this process."""
    silence_libraries()
    gpu = torch.cuda.is_available()

    def peak() -> int:
        return torch.cuda.max_memory_allocated() if gpu else memory("VmHWM")

    def forget() -> None:
        torch.cuda.reset_peak_memory_stats() if gpu else reset_peak()

    before = 0 if gpu else memory("VmRSS")
    forget()
    run = build_run(validate_recipe(recipe(words, folder, kind)), quiet=True)
    loading = peak() - before
    network = unwrap(run.model)
    forget()
    for step in range(2):
        train_step(run, step)
    training = peak() - before
    held = json.loads((run.directory.path / "run.json").read_text())["memory"]
    return {**held, "loading": loading, "training": training, "linear": linear_bytes(network)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="hidden size, a multiple of 128")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=512, help="tokens a row")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.kind is not None:
        print(json.dumps(measure(words, words.folder, words.kind)))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        store(words, folder / "model")
        print(
            "| | frozen | trained | gradients | optimiser | peak, loading | peak, two steps | bytes a linear weight |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for kind in words.kinds:
            arguments = [sys.executable, __file__, *sys.argv[1:], "--kind", kind, "--folder", str(folder)]
            out = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
            found = json.loads(out.splitlines()[-1])
            sizes = [
                f"{found[key] / GIB:.2f}"
                for key in ("frozen", "trained", "gradients", "optimizer", "loading", "training")
            ]
            print("|", " | ".join([kind, *sizes, f"{found['linear']:.3f}"]), "|", flush=True)


if __name__ == "__main__":
    main()

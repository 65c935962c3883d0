"""Opens an exported folder in a fresh process, by transformers and peft alone, and compares it with what was trained.

Run as a file, so that nothing else of this toolkit is imported: `python -P fresh_process.py QUESTION`, in JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional
from transformers.utils import logging


def _open(ask: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the network, in fp32 whatever it is stored in, and the missing and unexpected tensors."""
    auto = getattr(transformers, ask["auto"])
    options = {"dtype": torch.float32, "trust_remote_code": ask["trust_remote_code"], "output_loading_info": True}
    if ask.get("gguf"):
        where = {"gguf_file": ask["gguf"], "trust_remote_code": False}
        config = transformers.AutoConfig.from_pretrained(ask["folder"], **where)
        for key, value in ask["config"].items():
            setattr(config, key, value)
        network, report = auto.from_pretrained(ask["folder"], config=config, **{**options, **where})
    elif ask["base"] is None:
        network, report = auto.from_pretrained(ask["folder"], **options)
    else:
        from peft import PeftModel

        more = {key: ask[key] for key in ("num_labels", "pad_token_id") if ask.get(key) is not None}
        base, report = auto.from_pretrained(ask["base"], revision=ask["revision"], **more, **options)
        if ask["dequantize"]:
            base = base.dequantize()
        # A classifier's head is in the adapter, not in its base.
        report = {} if ask["num_labels"] is not None else report
        network = PeftModel.from_pretrained(base, ask["folder"])
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return network.eval(), {key: sorted(map(str, report.get(key, ()))) for key in keys}


@torch.no_grad()
def compute_logits(network: Any, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
    """Returns the logits of a batch, or the hidden states of a network without a head, in fp32."""
    outputs = network(**inputs, **options)
    logits: torch.Tensor = outputs["logits" if "logits" in outputs else "last_hidden_state"]
    return logits.float().contiguous()


def mean_loss(network: Any, tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> float | None:
    """Returns the mean cross-entropy over the targets of the rows `row0.*`, `row1.*` and so on; None without any."""
    loss, targets = 0.0, 0
    for row in range(sum(name.endswith(".targets") for name in tensors)):
        inputs = select_inputs(tensors, f"row{row}")
        wanted = inputs.pop("targets").flatten()
        scores = compute_logits(network, inputs, options).flatten(0, -2)
        if wanted.is_floating_point():
            loss += float(functional.mse_loss(scores[:, 0], wanted, reduction="sum").double())
            targets += len(wanted)
            continue
        loss += float(functional.cross_entropy(scores, wanted, ignore_index=-100, reduction="sum").double())
        targets += int((wanted != -100).sum())
    return loss / targets if targets else None


def select_inputs(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Returns the tensors named `prefix.*`, by what follows the prefix."""
    return {name.partition(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def read_tokens(ask: dict[str, Any]) -> dict[str, Any]:
    """Returns what the tokenizer in a GGUF file makes of texts, its chat template and its special tokens."""
    tok = transformers.AutoTokenizer.from_pretrained(ask["folder"], gguf_file=ask["gguf"], trust_remote_code=False)
    return {
        "ids": [tok(text, add_special_tokens=False)["input_ids"] for text in ask["texts"]],
        "chat template": tok.chat_template,
        "bos token": tok.bos_token,
        "eos token": tok.eos_token,
    }


def compare(ask: dict[str, Any]) -> dict[str, Any]:
    """Returns the differences between the opened network and the trained one."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = load_file(Path(ask["place"], "tensors.safetensors"))
    network, report = _open(ask)
    logits, expected = compute_logits(network, select_inputs(given, "probe"), ask["options"]), given["expected"]
    return {
        **report,
        "finite": bool(torch.isfinite(logits).all()),
        "distance": float((logits - expected).abs().max()) / (float(expected.abs().max()) or 1.0),
        "loss": mean_loss(network, given, ask["options"]),
        "tokens": read_tokens(ask) if ask.get("gguf") else None,
        "ours": sorted(name for name in sys.modules if name.split(".")[0] == "finetune"),
    }


if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    Path(question["place"], "answer.json").write_text(json.dumps(compare(question)), encoding="utf-8")

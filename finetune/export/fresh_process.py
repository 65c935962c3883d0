"""Opens an exported folder in a fresh process, by transformers and peft alone, and compares it with what was trained.

Run as a file, so that nothing else of this toolkit is imported: `python -P fresh_process.py ask.json`.
"""

import json
import sys
from pathlib import Path
from typing import Any


def _open(ask: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The network, in fp32 whatever it is stored in, and what loading reports of missing and unexpected tensors."""
    import torch
    import transformers

    auto = getattr(transformers, ask["auto"])
    options = {"dtype": torch.float32, "trust_remote_code": ask["trust_remote_code"]}
    if ask["base"] is None:
        network, report = auto.from_pretrained(ask["folder"], output_loading_info=True, **options)
    else:
        from peft import PeftModel

        more = {"num_labels": ask["num_labels"]} if ask["num_labels"] is not None else {}
        base, report = auto.from_pretrained(
            ask["base"], revision=ask["revision"], output_loading_info=True, **more, **options
        )
        if ask["dequantize"]:
            base = base.dequantize()
        # A classifier's head is in the adapter, not in its base.
        report = {} if ask["num_labels"] is not None else report
        network = PeftModel.from_pretrained(base, ask["folder"])
    keys = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return network.eval(), {key: sorted(map(str, report.get(key, ()))) for key in keys}


def compare(ask: dict[str, Any]) -> dict[str, Any]:
    """Returns the differences between the opened network and the trained one."""
    import torch
    from safetensors.torch import load_file
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    given = load_file(ask["tensors"])
    network, report = _open(ask)
    losses, targets = 0.0, 0
    with torch.no_grad():
        logits = network(**_inputs(given, "probe"), **ask["options"]).logits.float()
        for row in range(ask["rows"]):
            inputs = _inputs(given, f"row{row}")
            wanted = inputs.pop("targets")
            scores = network(**inputs, **ask["options"]).logits.float()
            losses += float(
                torch.nn.functional.cross_entropy(
                    scores.reshape(-1, scores.shape[-1]), wanted.reshape(-1), ignore_index=-100, reduction="sum"
                ).double()
            )
            targets += int((wanted != -100).sum())
    expected = given["expected"]
    return {
        **report,
        "finite": bool(torch.isfinite(logits).all()),
        "distance": float((logits - expected).abs().max()),
        "scale": float(expected.abs().max()),
        "loss": losses / targets if targets else None,
        "ours": sorted(name for name in sys.modules if name.split(".")[0] == "finetune"),
    }


def _inputs(given: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.partition(".")[2]: tensor for name, tensor in given.items() if name.startswith(f"{prefix}.")}


if __name__ == "__main__":
    question = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(question["answer"]).write_text(json.dumps(compare(question)), encoding="utf-8")

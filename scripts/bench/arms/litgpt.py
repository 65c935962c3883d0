"""LitGPT's own loop (`litgpt.finetune.full.fit`) over its own network, with the weights that all arms start from.

Its full fine-tuning clips no gradients: that is added before its optimiser's step, where the boundary is too.
"""

from pathlib import Path
from typing import Any

import lightning
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.finetune import full
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader

from bench.arms.adapters import load
from bench.cases import SHAPES
from bench.gate import Gate
from bench.spec import BETAS, CLIP, LR, Spec


def run(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn."""
    case, shape = spec.case, SHAPES[spec.case.shape]
    sizes = Config(
        block_size=case.length,
        padded_vocab_size=shape.vocab,
        vocab_size=shape.vocab,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden,
        n_query_groups=shape.kv_heads,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-6,
        mlp_class_name="LLaMAMLP",
        intermediate_size=shape.intermediate,
    )
    fabric = lightning.Fabric(
        accelerator="cpu", devices=1, precision="bf16-mixed" if case.precision == "bf16" else "32-true"
    )
    network = GPT(sizes)
    weights: dict[str, Any] = {}
    copy_weights_hf_llama(sizes, {}, weights, load(spec.model, "full", "fp32").state_dict())
    network.load_state_dict(weights, strict=False)
    if shape.tied:
        network.lm_head.weight = network.transformer.wte.weight
    model = fabric.setup(network.train())
    inner = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)
    optimizer = fabric.setup_optimizers(inner)
    step_of, targets = optimizer.step, case.rows * (case.length - 1)

    def clipped(*args: Any, **kwargs: Any) -> Any:
        gate.norm(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        return step_of(*args, **kwargs)

    def noted(logits: Any, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = chunked_cross_entropy(logits, labels, *args, **kwargs)
        if model.training:
            part = targets // case.accumulation
            gate.add(loss.detach() * part, part)
        return loss

    optimizer.step, full.chunked_cross_entropy = clipped, noted
    full.Tokenizer = lambda _: None
    full.CycleIterator = _held(full.CycleIterator, gate, case.accumulation)
    constant = torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)
    loader = DataLoader(_Rows(torch.from_numpy(spec.load_rows())), batch_size=spec.micro)
    full.fit(
        fabric=fabric,
        state={"model": model, "optimizer": optimizer, "scheduler": constant, "iter_num": 0, "step_count": 0},
        train_dataloader=fabric.setup_dataloaders(loader),
        val_dataloader=loader,
        devices=1,
        resume=False,
        checkpoint_dir=Path(spec.folder),
        out_dir=Path(spec.folder),
        train=TrainArgs(
            save_interval=None,
            log_interval=1,
            global_batch_size=case.rows,
            micro_batch_size=spec.micro,
            epochs=2,
            max_steps=spec.steps + 1,
            max_seq_length=case.length,
        ),
        eval=EvalArgs(interval=1_000_000, max_iters=1, initial_validation=False, final_validation=False),
        data=None,
    )


class _Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows as its data modules give them."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        counts = {"raw": len(row), "raw_plus_prompt_template": len(row)}
        return {"input_ids": row, "labels": row, "token_counts": {k: torch.tensor(v) for k, v in counts.items()}}


def _held(iterator: type[Any], gate: Gate, accumulation: int) -> type[Any]:
    class Held(iterator):
        """Its iterator over batches, which is asked first in each of its iterations."""

        asked = 0

        def __next__(self) -> Any:
            if self.asked % accumulation == 0:
                gate.before_step()
            self.asked += 1
            return super().__next__()

    return Held

"""The limit on two processes: DDP, FSDP2 and DeepSpeed's ZeRO, put around a network by hand."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.arms.adapters import load
from bench.arms.bare import autocast, loss_sum_of
from bench.cases import EACH
from bench.gate import Gate
from bench.spec import BETAS, CLIP, LR, Spec

LossSum = Callable[[Any, torch.Tensor], torch.Tensor]


def run(spec: Spec, gate: Gate) -> None:
    """Trains, turn by turn."""
    model = load(spec.model, spec.case.kind, spec.case.precision).train()
    (_zero if spec.launch.startswith("zero") else _torch)(spec, gate, model, loss_sum_of(spec, model))


def _torch(spec: Spec, gate: Gate, model: Any, loss_sum: LossSum) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    case, shards, each = spec.case, spec.launch.startswith("fsdp"), spec.launch.endswith(EACH)
    if shards:
        mesh = init_device_mesh("cpu", (spec.processes,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped: Any = fully_shard(model, mesh=mesh)
    else:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = _adamw(wrapped)
    rows, rank = torch.from_numpy(spec.load_rows()), dist.get_rank()
    targets = spec.micro * case.accumulation * (case.length - 1)
    for step in range(spec.steps + 1):
        gate.before_step()
        window = spec.window(step, rank)
        for index, part in enumerate(window):
            last = index == len(window) - 1
            if shards:
                wrapped.set_requires_gradient_sync(last or each)
            with nullcontext() if last or shards else wrapped.no_sync():
                with autocast(case.precision):
                    loss: Any = loss_sum(wrapped, rows[part])
                (loss / targets).backward()  # gradients are averaged over the processes
            gate.add(loss.detach(), targets // case.accumulation)
        norm: Any = torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        gate.norm(norm.full_tensor() if shards else norm)


def _zero(spec: Spec, gate: Gate, model: Any, loss_sum: LossSum) -> None:
    import deepspeed

    from finetune.distributed.strategies.deepspeed_config import fit_to_model

    case = spec.case
    deepspeed.init_distributed(dist_backend="gloo")
    config = json.loads(
        (Path(__file__).resolve().parents[3] / f"ds_configs/{spec.launch}.json").read_text(encoding="utf-8")
    )
    config |= {
        "train_batch_size": case.rows,
        "train_micro_batch_size_per_gpu": spec.micro,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    sizes = [p.numel() for p in model.parameters()]
    fit_to_model(config, hidden_size=model.config.hidden_size, parameter_sizes=sizes)
    engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
    rows, rank = torch.from_numpy(spec.load_rows()), dist.get_rank()
    targets = spec.micro * (case.length - 1)
    for step in range(spec.steps + 1):
        gate.before_step()
        for part in spec.window(step, rank):
            loss = loss_sum(engine, rows[part])
            engine.backward(loss / targets)
            engine.step()
            gate.add(loss.detach(), targets)
        gate.norm(engine.get_global_grad_norm())


def _adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

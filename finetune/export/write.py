"""Exports a run: writes it whole or not at all, verifies it, and only then gives it its name."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

from finetune.config.recipe_schema import Recipe
from finetune.export import find_weights, merge, model_card, stop_tokens, validate_files, verify_export
from finetune.export.find_weights import WeightSource
from finetune.models import lora_adapters, prompts
from finetune.models.pretrained_files import as_written, written_shapes
from finetune.tasks.task import Task, TaskData
from finetune.tasks.task_lookup import find_task, task_config
from finetune.utils.atomic_files import follow_umask, remove, sync, write_json
from finetune.utils.errors import CheckpointError, RecipeError

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Job:
    """What is exported, and what is needed for it."""

    source: WeightSource
    recipe: Recipe
    """The run's, with the base that was asked for."""
    ready: TaskData
    kind: str
    shard_size: str


def export(
    place: Path,
    kind: str,
    say: Say,
    *,
    to: Path | None = None,
    step: int | None = None,
    base: str | None = None,
    shard_size: str = "5GB",
) -> Path:
    """Writes a run's weights so that transformers or peft opens them, and proves that they say what was trained.

    Args:
        place: A run, or one of its checkpoints.
        kind: `adapter`, `merged` (fp32) or `merged-16bit`.
        say: Is told what people read.
        base: The base at another place than the recipe's.

    Returns:
        The folder.

    Raises:
        FinetuneError: If it cannot be written, or is not what was trained: then no folder has the name.
    """
    merge.return_memory_at_once()
    found = find_weights.find_weights(place, step)
    with found.held:
        target = to if to is not None else found.run / "exports" / kind
        _check_target(target)
        recipe = merge.with_base(found, base)
        _check_kind(found, kind)
        ready, reason = merge.data_of(found, recipe)
        if reason is not None:
            say(f"No validation rows are compared, since the run's data cannot be prepared here: {reason}")
        job = _Job(found, recipe, ready, kind, shard_size)
        if recipe.lora is not None:
            file = found.weights / merge.ADAPTER
            validate_files.check_adapter(merge.load_tensors(file), file)
        staging = _staging(target)
        try:
            lines = _written(job, staging, say)
        except BaseException:
            _set_aside(staging, target)
            raise
        _finish(job, staging, target, lines)
    say(f"{target} holds step {found.step} of {found.run} as {kind}.")
    return target


def _written(job: _Job, staging: Path, say: Say) -> list[str]:
    """Writes and proves; returns what was proved."""
    try:
        if job.kind == "adapter":
            figures = _adapter(job, staging, say)
        else:
            figures = _merged(job, staging, say)
    except OSError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The export cannot be written to {staging}: {error.strerror or error}. Free space, or choose another --to."
        ) from error
    for line in figures.lines():
        say(line)
    return figures.lines()


def _merged(job: _Job, staging: Path, say: Say) -> verify_export.Figures:
    dtype = _dtype(job)
    model = merge.merged(job.source, job.recipe, job.ready, dtype)
    _say_base(job, say)
    stops: list[int] = []
    if model.can_generate():
        told = model.generation_config or GenerationConfig.from_model_config(model.config)
        stops = _stops(job, told, say)
        model.generation_config = prompts.stopping_at(told, stops)
    expected = written_shapes(model)
    ties = dict(model.all_tied_weights_keys)
    infinite = {name for name, buffer in model.named_buffers() if bool(buffer.isinf().any())}
    model.save_pretrained(staging, max_shard_size=job.shard_size)
    del model
    merge.free()
    if job.ready.tokenizer is not None:
        job.ready.tokenizer.save_pretrained(staging)
    size = validate_files.check(staging, expected, dtype, ties, infinite)
    stop_tokens.check(staging, stops, job.ready.tokenizer)
    say(f"Written: {len(expected) - len(ties)} tensors of {str(dtype).removeprefix('torch.')}, {size:,} bytes.")
    return _prove(job, staging, dtype)


def _adapter(job: _Job, staging: Path, say: Say) -> verify_export.Figures:
    weights = job.source.weights
    tensors = merge.load_tensors(weights / merge.ADAPTER)
    save_file({name: tensor.float() for name, tensor in tensors.items()}, staging / merge.ADAPTER, {"format": "pt"})
    lora_adapters.describe_adapter(
        weights, staging, base=str(job.recipe.model.name), revision=job.recipe.model.revision
    )
    if job.ready.tokenizer is not None:
        job.ready.tokenizer.save_pretrained(staging)
    stops: list[int] = []
    if merge.source_head(job.source) == "causal_lm":
        # peft takes the base's; this one is for people to give to `generate`, and for ours.
        told = merge.generation_of(job.recipe)
        stops = _stops(job, told, say)
        prompts.stopping_at(told, stops).save_pretrained(staging)
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    size = validate_files.check(staging, expected, torch.float32, {})
    stop_tokens.check(staging, stops, job.ready.tokenizer)
    say(f"Written: an adapter of {len(tensors)} tensors, {size:,} bytes.")
    return _prove(job, staging, torch.float32)


def _stops(job: _Job, told: GenerationConfig, say: Say) -> list[int]:
    """The tokens at which what is written stops."""
    if job.source.ends == []:
        say("No answer that was learned ends in a special token: generation will not stop by itself (chat.end_token).")
    return prompts.ends(told, job.ready.tokenizer, stop_tokens.learned(job.source, job.ready.tokenizer))


def _prove(job: _Job, staging: Path, dtype: torch.dtype) -> verify_export.Figures:
    task, head = find_task(job.source.recipe), merge.source_head(job.source)
    model = merge.trained(job.source, job.recipe, job.ready, quantised=False)
    text = lora_adapters.config_of(model).get_text_config()
    longest = min(getattr(text, "max_position_embeddings", None) or 64, 64)
    probe = verify_export.ask(model, task, job.ready, text.vocab_size, longest)
    expected = _expected(job, model)
    worst = verify_export.worst_of(staging, expected)
    del model, expected
    merge.free()
    answer = verify_export.fresh(staging, probe, {"head": head, **_how(job)})
    figures = verify_export.Figures(
        distance=answer["distance"] / (answer["scale"] or 1.0),
        loss=answer["loss"],
        trained_loss=probe.loss,
        limits=verify_export.TOLERANCE[dtype],
        worst=worst,
        dtype=dtype,
        notes=_notes(job, task, probe),
    )
    verify_export.judge(staging, answer, probe, figures)
    return figures


def _expected(job: _Job, model: Any) -> dict[str, torch.Tensor]:
    """Each tensor as it has to be, in fp32, from the network that was trained; that one is used up."""
    if job.kind == "adapter":
        keys = lora_adapters.adapter_keys(model)
        state = model.state_dict()
        return {key: state[name] for name, key in keys.items()}
    merged = lora_adapters.merge(model, torch.float32)
    return as_written(merged, merged.state_dict())


def _how(job: _Job) -> dict[str, Any]:
    """How the fresh process opens what was written."""
    recipe = job.recipe
    adapter = job.kind == "adapter"
    return {
        "base": recipe.model.name if adapter else None,
        "revision": recipe.model.revision,
        "trust_remote_code": recipe.model.trust_remote_code,
        "num_labels": _num_labels(job) if adapter else None,
        "dequantize": _quantised(job) == "stored",
    }


def _num_labels(job: _Job) -> int | None:
    if merge.source_head(job.source) == "causal_lm":
        return None
    return int(task_config(job.recipe, job.ready).num_labels)


def _notes(job: _Job, task: Task, probe: verify_export.Probe) -> tuple[str, ...]:
    """For a base that was quantised in training: how far what is written is from what was trained."""
    kind = _quantised(job)
    if kind is None:
        return ()
    model = merge.trained(job.source, job.recipe, job.ready, quantised=True)
    away, loss = verify_export.distance(model, probe, task)
    text = f"In training the base was quantised ({kind}): with it, logits differ by {away:.1e} of the largest"
    if loss is not None and probe.loss is not None:
        text += f", and the loss is {loss:.5f} instead of {probe.loss:.5f}"
    return (f"{text}. That is the quantisation's distance, not the export's.",)


def _say_base(job: _Job, say: Say) -> None:
    kind, base = _quantised(job), job.recipe.model.name or "base"
    if kind == "stored":
        say(f"Merged onto the dequantised {base}: it is stored quantised, and what it was before is not at hand.")
    elif kind is not None:
        say(f"Merged onto the unquantised {base}; it was trained on the quantised one ({kind}).")


def _quantised(job: _Job) -> str | None:
    """How the base was quantised in training: as the recipe says, or `stored` so; None if it was not."""
    if job.recipe.lora is None:
        return None
    stored = merge.is_quantised(merge.config_of(job.source, job.recipe, job.ready))
    return "stored" if stored else job.recipe.model.quantization


def _dtype(job: _Job) -> torch.dtype:
    if job.kind == "merged":
        return torch.float32
    config = merge.config_of(job.source, job.recipe, job.ready)
    return torch.float16 if getattr(config, "dtype", None) == torch.float16 else torch.bfloat16


def _check_kind(found: WeightSource, kind: str) -> None:
    merge.source_head(found)
    if kind != "adapter":
        return
    if found.recipe.lora is None:
        raise RecipeError(
            f"{found.run} trained all weights (its recipe has no lora section), so there is no adapter. Use --as "
            "merged or --as merged-16bit."
        )
    if found.recipe.model.name is None:
        raise RecipeError(
            f"{found.run} put its adapter onto random weights, which lie in no folder that peft could open. Use "
            "--as merged."
        )


def _check_target(target: Path) -> None:
    if target.exists():
        raise RecipeError(f"{target} is there already. Choose another --to, or remove it.")


def _staging(target: Path) -> Path:
    staging = target.with_name(target.name + ".staging")
    try:
        remove(staging)
        staging.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(
            f"--to: cannot write to {target.parent}: {error.strerror or error}. Choose another folder."
        ) from error
    return staging


def _set_aside(staging: Path, target: Path) -> None:
    """What did not pass stays to be looked at, under a name that nobody opens by accident."""
    failed = target.with_name(target.name + ".failed")
    with contextlib.suppress(OSError):  # what is wrong is being said already
        remove(failed)
        if any(staging.glob("*.safetensors")):
            staging.rename(failed)
        else:
            remove(staging)


def _finish(job: _Job, staging: Path, target: Path, proof: list[str]) -> None:
    try:
        model_card.write(staging, job.source, job.kind, proof, merge.base_folder(job.recipe))
        facts = {"run": str(job.source.run), "step": job.source.step, "as": job.kind, "proof": proof}
        write_json(staging / "export.json", {**facts, "base": job.source.facts.get("base")})
        follow_umask(staging)
        for path in sorted(staging.rglob("*")):
            if path.is_file():
                sync(path)
        sync(staging)
        staging.rename(target)
        sync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"The export cannot be written to {target}: {error.strerror or error}. Free space, or choose another --to."
        ) from error

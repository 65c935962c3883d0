"""Exports a run: writes it whole or not at all, verifies it, names it only then, and uploads it if asked to."""

import contextlib
import copy
import ctypes
import errno
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import filelock
import huggingface_hub
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig, PreTrainedModel

from finetune.checkpoint import trusted_code
from finetune.checkpoint.run_fingerprint import base_folder
from finetune.config import recipe_paths
from finetune.config.recipe_schema import Recipe
from finetune.export import find_weights, merge, model_card, verify_export, write_gguf
from finetune.export.find_weights import WeightSource
from finetune.models import lora_adapters, pretrained_files, prompts
from finetune.models.heads import Head
from finetune.tasks.task import TaskData
from finetune.tasks.task_lookup import find_task, named_task
from finetune.utils.atomic_files import lock_file, remove_path, sync_files, sync_to_disk, write_json
from finetune.utils.compat import accelerate_private  # noqa: F401 - or saving imports a library that warns
from finetune.utils.errors import CheckpointError, FinetuneError, RecipeError

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Export:
    """Weights to export, and what is needed for it."""

    source: WeightSource
    recipe: Recipe
    """The run's, with the base that was requested."""
    ready: TaskData
    kind: str
    shard_size: str
    head: Head
    config: PretrainedConfig
    """Configuration of the network that is written."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that are written."""
        if self.kind != "merged-16bit":
            return torch.float32
        return torch.float16 if getattr(self.config, "dtype", None) == torch.float16 else torch.bfloat16

    @property
    def quantized(self) -> str | None:
        """Quantisation of the base in training: as the recipe says, or `stored` so; None if there was none."""
        if self.recipe.lora is None:
            return None
        stored = getattr(self.config, "quantization_config", None) is not None
        return "stored" if stored else self.recipe.model.quantization

    @property
    def gguf(self) -> str | None:
        """Name of the file, if it is GGUF that is written."""
        return f"model-{self.kind.removeprefix('gguf-')}.gguf" if self.kind in write_gguf.TYPES else None


def export_weights(
    folder: Path,
    kind: str,
    say: Say,
    *,
    to: Path | None = None,
    step: int | None = None,
    base: str | None = None,
    shard_size: str = "5GB",
    trust_remote_code: bool = False,
) -> Path:
    """Writes a run's weights, verified to be what was trained, for transformers or peft to open; returns the folder.

    Args:
        folder: A run, or one of its checkpoints.
        kind: `adapter`, `merged` (fp32), `merged-16bit`, `gguf-f16` or `gguf-q8_0`.
        say: Gets each line that is reported.
        base: The base at another place than the recipe's.
        trust_remote_code: Whether Python code that the run names or brings may run, though this user did not start it
            on this machine.

    Raises:
        FinetuneError: If it cannot be written, or is not what was trained: then no folder has the name.
    """
    # Freed memory goes back at once, not into pieces of a growing heap: merging a small model's many tensors held three
    # copies of it. Source: mallopt(3), M_MMAP_THRESHOLD.
    if (set_option := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        set_option(-3, 1 << 20)
    code = (trusted_code.SHIPPED, "task.name", "task.loss")
    source = find_weights.find_weights(folder, step, runs=code, trusted=trust_remote_code)
    target = to if to is not None else source.run / "exports" / kind
    with source.held, _only_writer(target):
        recipe = merge.with_base(source, base)
        head = merge.source_head(source)
        find_weights.check_kind(source.run, recipe, kind)
        ready = _build_data(source, recipe, say)
        job = _Export(source, recipe, ready, kind, shard_size, head, merge.config_of(source, recipe, ready))
        if kind == "adapter":
            _check_base_opens(job)
        if job.gguf is not None:
            write_gguf.check_convertible(job.config, ready.tokenizer, source.run, text=head.next_token)
        staging = target.with_name(target.name + ".staging")
        try:
            remove_path(staging)
            staging.mkdir()
            if job.gguf is not None:
                _write_gguf(job, staging / job.gguf, say)
            else:
                stops = (_write_adapter if kind == "adapter" else _write_merged)(job, staging, say)
                if ready.tokenizer is not None:
                    ready.tokenizer.save_pretrained(staging)
                beside = pretrained_files.files_beside(recipe)
                beside |= pretrained_files.files_beside(merge.opened_recipe(source, recipe))
                if (files := named_task(recipe).files) is not None:
                    beside |= files(recipe, job.config)
                pretrained_files.write_beside(staging, beside)
                prompts.check_stop_tokens(staging, stops, ready.tokenizer)
            proof = _verify(job, staging)
            for line in proof:
                say(line)
            model_card.write_model_card(staging, source, kind, proof, base_folder(recipe.model), head)
            facts = {"run": str(source.run), "step": source.step, "as": kind, "proof": proof}
            if head.may_be_new and not head.bare and job.config.num_labels > 1:
                facts["classes"] = [str(job.config.id2label[number]) for number in range(job.config.num_labels)]
            write_json(staging / "export.json", {**facts, "base": source.facts.get("base")})
            sync_files(staging)
            sync_to_disk(staging)
            staging.rename(target)
            sync_to_disk(target.parent)
        except BaseException as error:
            _set_aside(staging, target)
            # safetensors says by its own error that a disk is full.
            if isinstance(error, OSError | SafetensorError) and not isinstance(error, CheckpointError):
                number = getattr(error, "errno", None)
                full = number in (errno.ENOSPC, errno.EDQUOT) if number is not None else "os error" in str(error)
                raise CheckpointError(
                    f"The export cannot be written to {target}: {getattr(error, 'strerror', None) or error}. "
                    f"{'Free space, or choose' if full else 'Choose'} another --to."
                ) from error
            raise
    say(f"{target} holds step {source.step} of {source.run} as {kind}.")
    if job.gguf is None and (warning := pretrained_files.unknown_processor(recipe.model, target)) is not None:
        say(warning)
    return target


def _build_data(source: WeightSource, recipe: Recipe, say: Say) -> TaskData:
    """Returns the run's data; a tokenizer only, if they cannot be prepared here."""
    try:
        return find_task(recipe).build_data(recipe, True)
    except (FinetuneError, OSError) as error:
        reason = " ".join(str(error).split())
    say(f"No validation rows are compared, since the run's data cannot be prepared here: {reason}")
    trusted, there = recipe.model.trust_remote_code, any(source.weights.glob("tokenizer*"))
    tokenizer = AutoTokenizer.from_pretrained(source.weights, trust_remote_code=trusted) if there else None
    return TaskData(train=None, tokenizer=tokenizer)


def _build_merged(job: _Export, say: Say) -> PreTrainedModel:
    base = job.recipe.model.name or "base"
    model = merge.build_merged(job.source, job.recipe, job.ready, job.dtype)
    if job.quantized == "stored":
        say(f"Merged onto the dequantised {base}: it is stored quantised, and what it was before is not at hand.")
    elif job.quantized is not None:
        say(f"Merged onto the unquantised {base}; it was trained on the quantised one ({job.quantized}).")
    return model


def _write_merged(job: _Export, staging: Path, say: Say) -> list[int]:
    """Writes weights and generation config; returns the tokens at which generation stops. So does `_write_adapter`."""
    model = _build_merged(job, say)
    stops: list[int] = []
    if model.can_generate():
        generation = model.generation_config or GenerationConfig.from_model_config(model.config)
        stops = _stops(job, generation, say)
        model.generation_config = prompts.stopping_at(generation, stops)
    infinite = {name for name, buffer in model.named_buffers() if bool(buffer.isinf().any())}
    shapes, ties = pretrained_files.written_shapes(model), pretrained_files.written_ties(model)
    model.save_pretrained(staging, max_shard_size=job.shard_size)
    del model
    gc.collect()  # networks refer to themselves
    say(verify_export.check_files(staging, shapes, job.dtype, ties, infinite))
    return stops


def _write_gguf(job: _Export, file: Path, say: Say) -> None:
    """Writes weights, tokenizer, template and ends of texts in one file, and a Modelfile beside it."""
    model = _build_merged(job, say)
    tokenizer: Any = job.ready.tokenizer
    stops = _stops(job, model.generation_config or GenerationConfig.from_model_config(model.config), say)
    if len(stops) > write_gguf.MOST_STOPS:
        names = ", ".join(tokenizer.convert_ids_to_tokens(stops[write_gguf.MOST_STOPS :]))
        say(f"A GGUF file names {write_gguf.MOST_STOPS} ends of texts. Only the Modelfile says that {names} are, too.")
    add_bos = write_gguf.begins_with_bos(tokenizer, job.recipe)
    say(write_gguf.write_gguf(model, tokenizer, file, job.kind, stops, add_bos=add_bos))
    if not write_gguf.write_modelfile(file.parent, file.name, tokenizer, stops) and tokenizer.chat_template:
        say("The Modelfile has no TEMPLATE: Ollama takes the one in the file if it knows it. Compare an answer first.")


def _write_adapter(job: _Export, staging: Path, say: Say) -> list[int]:
    weights, section = job.source.weights, job.recipe.model
    tensors = dict(verify_export.tensors_of(weights / merge.ADAPTER, "Restore it, or take another step."))
    save_file({name: tensor.float() for name, tensor in tensors.items()}, staging / merge.ADAPTER, {"format": "pt"})
    config = recipe_paths.adapter_config(weights) | {"inference_mode": True, "revision": section.revision}
    config["base_model_name_or_path"] = recipe_paths.place_of_model(str(section.name))
    (staging / "adapter_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    stops: list[int] = []
    if job.head.next_token or job.head.encodes:
        # peft takes the base's; this one is for people to give to `generate`, and for ours.
        try:
            generation = GenerationConfig.from_pretrained(str(section.name), revision=section.revision)
        except OSError:  # it has none
            generation = GenerationConfig.from_model_config(job.config)
        stops = _stops(job, generation, say)
        prompts.stopping_at(generation, stops).save_pretrained(staging)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    say(verify_export.check_files(staging, shapes, job.dtype))
    return stops


def _stops(job: _Export, generation: GenerationConfig, say: Say) -> list[int]:
    if job.source.ends == []:
        say("No answer that was learned ends in a special token: generation will not stop by itself (chat.end_token).")
    tokenizer = job.ready.tokenizer
    return prompts.stop_tokens(generation, tokenizer, job.source.learned_stop_tokens(tokenizer))


def _verify(job: _Export, staging: Path) -> list[str]:
    """Compares what was written with the network as it was trained, and returns the results for people."""
    recipe = job.recipe
    model = merge.build_trained(job.source, recipe, job.ready, quantised=False)
    probe = verify_export.probe_network(model, job.ready, job.head)
    adapter = job.kind == "adapter"
    if adapter:
        state = model.state_dict()
        expected = {key: state[name] for name, key in lora_adapters.adapter_keys(model).items()}
    else:
        model = lora_adapters.merge_adapters(model, torch.float32)
        state = model.state_dict()
        expected = pretrained_files.as_written(model, state)
    if job.gguf is not None:
        read = partial(write_gguf.read_tensors, config=job.config, names=expected.keys())
        worst = verify_export.worst_tensor(staging / job.gguf, expected, read)
    else:
        worst = verify_export.worst_tensor(staging, expected)
    del model, state, expected
    gc.collect()
    question = {
        "auto": job.head.auto_class,
        "base": recipe.model.name if adapter else None,
        "revision": recipe.model.revision,
        "trust_remote_code": recipe.model.trust_remote_code,
        "num_labels": job.config.num_labels if adapter and job.head.may_be_new else None,
        # Decoders classify at the last token that is no padding.
        "pad_token_id": job.config.pad_token_id if adapter and job.head.may_be_new else None,
        "dequantize": job.quantized == "stored",
    }
    if job.gguf is not None:
        texts = write_gguf.check_texts(job.ready.tokenizer)
        question |= {"gguf": job.gguf, "config": write_gguf.not_in_reader(job.config), "texts": texts}
    answer = verify_export.open_in_fresh_process(staging, probe, question)
    rounded = write_gguf.ROUNDED.get(job.kind, job.dtype)
    proof = [verify_export.check_figures(staging, answer, probe, worst, rounded)]
    if job.gguf is not None:
        proof.append(write_gguf.check_tokens(staging / job.gguf, question, answer["tokens"], job.ready.tokenizer))
    if job.quantized is not None:
        quantized = merge.build_trained(job.source, recipe, job.ready, quantised=True)
        proof.append(verify_export.quantization_note(quantized, probe, job.quantized))
    return proof


def _check_base_opens(job: _Export) -> None:
    """Raises a `RecipeError` if transformers cannot open the base of an adapter: packed, and without its pooler."""
    section = job.recipe.model
    if section.name is None or getattr(job.config, "quantization_config", None) is None:
        return
    with torch.device("meta"):
        bare = job.head.auto.from_config(copy.deepcopy(job.config), trust_remote_code=section.trust_remote_code)
    beside = job.head.modules_beside_body(bare)
    if lacking := [name for name in pretrained_files.added_modules(bare, section, job.head) if name not in beside]:
        raise RecipeError(
            f"{section.name} is stored in 4 bits and lacks {', '.join(lacking)}, which transformers cannot draw there: "
            "nobody could open an adapter on it. Use --as merged or --as merged-16bit."
        )


@contextlib.contextmanager
def _only_writer(target: Path) -> Iterator[None]:
    """Keeps other exports from a folder that is to be written, until it is there.

    Raises:
        RecipeError: If it is there, another export is writing it, or a run writes what has this name.
        CheckpointError: If it cannot be written.
    """
    inside = next((parent for parent in target.absolute().parents if recipe_paths.kind_of(parent) == "run"), None)
    if inside is not None and not target.absolute().is_relative_to(inside / "exports"):
        raise RecipeError(
            f"--to: {target} lies in the run directory {inside}, where a run writes and deletes. Leave --to out, and "
            "it is written below exports/ there, or choose a folder elsewhere."
        )
    with CheckpointError.explaining(f"--to: cannot write to {target.parent}", "Choose another folder.", OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        file, _ = lock_file(target.parent, f".{target.name}.lock")
        lock = filelock.FileLock(file)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as error:
            raise RecipeError(
                f"{target} is being written by another export. Wait until it has ended, or choose another --to."
            ) from error
    with lock:
        try:
            if target.exists():
                raise RecipeError(f"{target} is there already. Choose another --to, or remove it.")
            yield
        finally:
            # While it is held: whoever waits for a file that is gone takes a new one.
            file.unlink(missing_ok=True)


def _set_aside(staging: Path, target: Path) -> None:
    """Keeps what failed for a look at it, under a name that nobody opens by accident."""
    failed = target.with_name(target.name + ".failed")
    with contextlib.suppress(OSError):  # what is wrong is being reported already
        remove_path(failed)
        if any(staging.glob("*.safetensors")) or any(staging.glob("*.gguf")):
            staging.rename(failed)
        else:
            remove_path(staging)


def check_login(name: str) -> None:
    """Raises a `CheckpointError` if nobody is logged in to the hub, or it does not answer."""
    if huggingface_hub.get_token() is None:
        raise CheckpointError(
            f"--push-to {name}: nobody is logged in to the hub. Run `hf auth login`, or set HF_TOKEN; or leave "
            "--push-to out, and upload the folder later. Nothing was written."
        )
    what = f"--push-to {name}: the hub refuses this login, or is out of reach"
    with CheckpointError.explaining(what, "Nothing was written.", Exception):  # the client's errors have many classes
        huggingface_hub.HfApi().whoami()


def push_folder(folder: Path, name: str) -> str:
    """Uploads a folder as a private model; returns its address.

    Raises:
        CheckpointError: If that fails; the folder stays.
    """
    api = huggingface_hub.HfApi()
    advice = f"The export is whole, in {folder}: `hf upload {name} {folder}`."
    with CheckpointError.explaining(f"--push-to {name}", advice, Exception):  # the client's errors have many classes
        repo_url = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=repo_url.repo_id, folder_path=str(folder), commit_message="Export")
    return str(repo_url)

"""The support matrix: which features of recipes and launch files go together, and what shows it.

It is written to docs/support.md by

    python tests/support/support_matrix.py docs/support.md      # `make support-matrix`, a minute

What is refused is not written down here. Each pair goes through a dry run of a real recipe under a real launch file, as
on a machine without a GPU and, where that refuses it, as on one with GPUs; the page quotes what the dry run says. Only
features, the tests that prove pairs, and what is planned or never will be stand here.
"""

import contextlib
import itertools
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import testdata
import yaml
from harness import ROOT
from recipes_for_tests import ARCHITECTURES, LLAMA, base

from finetune.config.recipe import validate_recipe
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.export.merge import source_head
from finetune.training.dry_run import describe
from finetune.utils.errors import FinetuneError

# ---------------------------------------------------------------- what there is

LAUNCHES = (
    *("single", "ddp", "fsdp", "hsdp", "fsdp_offload", "zero1", "zero2", "zero3", "zero3_offload", "zero3_nvme"),
    *("sp", "fsdp_sp", "tp", "fsdp_tp", "fsdp_tp_sp"),
)
"""The launch files that ship. `fsdp_grad_op`, `fsdp_2nodes` and `zero3_2nodes` are variants of others."""
LAYOUTS = ("ddp", "fsdp", "hsdp", "fsdp_offload", "zero1", "zero2", "zero3", "zero3_offload")
"""Launch files that `sp_size`, `tp_size` and `cp_size` are added to."""


@dataclass(frozen=True)
class Feature:
    """What a recipe says to have something."""

    title: str
    keys: Mapping[str, Any]
    given: Mapping[str, Any] = field(default_factory=dict)
    """What it needs beside, unless the other feature of a pair says otherwise."""


_LORA = {"lora.rank": 4}
_CLASSIFIER = {
    "task.name": "sequence_classification",
    "task.num_labels": 7,
    "data.packing": "padded",
    "model.config": ARCHITECTURES["bert"]["model"]["config"],
}
_PAIRS = [{"path": "pairs.jsonl", "pair_field": "claim"}]
FEATURES = {
    "all": Feature("all weights", {"lora": None}),
    "lora": Feature("LoRA", _LORA),
    "dora": Feature("DoRA", {**_LORA, "lora.dora": True}),
    "dropout": Feature("LoRA with dropout", {**_LORA, "lora.dropout": 0.1}),
    "nf4": Feature("QLoRA, nf4", {**_LORA, "model.quantization": "nf4"}),
    "int8": Feature("QLoRA, int8", {**_LORA, "model.quantization": "int8"}),
    "frozen": Feature("frozen parts", {"model.freeze": r".*\.(embed_tokens|embeddings)"}),
    "documents": Feature("packed documents", {"data.packing": "documents"}),
    "wrapped": Feature("one wrapped stream", {"data.packing": "wrapped"}),
    "padded": Feature("padded rows", {"data.packing": "padded"}),
    "chat": Feature("conversations", {"chat.template": "plain"}),
    "classes": Feature(
        "sequence classification",
        {"task.name": "sequence_classification", "task.num_labels": 7},
        {"data.packing": "padded", "model.config": ARCHITECTURES["bert"]["model"]["config"]},
    ),
    "weights": Feature(
        "class weights",
        {"task.class_weights": "balanced"},
        _CLASSIFIER,
    ),
    "pairs": Feature("sentence pairs", {"data.train": _PAIRS, "data.validation": _PAIRS}, _CLASSIFIER),
    "numbers": Feature(
        "regression",
        {"task.name": "regression", "task.num_labels": None},
        {"data.packing": "padded", "model.config": ARCHITECTURES["bert"]["model"]["config"]},
    ),
    "words": Feature(
        "token classification",
        {"task.name": "token_classification", "task.num_labels": 5},
        {"data.packing": "padded", "model.config": ARCHITECTURES["bert"]["model"]["config"]},
    ),
    "targets": Feature(
        "sequence to sequence",
        {"task.name": "seq2seq_lm"},
        {
            "data.packing": "padded",
            "data.train": [{"path": "pairs.csv", "pair_field": "target"}],
            "data.validation": [],
            "model.config": {
                "model_type": "t5",
                "d_model": 64,
                "d_kv": 16,
                "d_ff": 128,
                "num_layers": 2,
                "num_heads": 4,
            },
        },
    ),
    "preferences": Feature(
        "preferences of pairs",
        {"task.name": "dpo"},
        {"data.packing": "documents", "data.train": [{"sample": 60}], "data.validation": [], "chat.template": "plain"},
    ),
    "smoothing": Feature("label smoothing", {"task.label_smoothing": 0.1}),
    "noise": Feature("NEFTune", {"model.neftune_alpha": 5.0}),
    "embedding": Feature(
        "embeddings",
        {"task.name": "embedding"},
        {"data.packing": "padded", "data.train": [{"sample": 60}], "data.validation": []},
    ),
    "teacher": Feature(
        "distillation",
        {"task.name": "distill", "distillation.teacher": {"name": testdata.MODEL}},
        {"data.packing": "documents", "chat": None},
    ),
    "own_task": Feature("custom task", {"task.name": "own_task:mlp"}),
    "fp32": Feature("fp32", {"precision": "fp32"}),
    "bf16": Feature("bf16", {"precision": "bf16"}),
    "fp16": Feature("fp16", {"precision": "fp16"}),
    "fp8": Feature("fp8", {"model.fp8": "emulated"}, {"precision": "bf16"}),
    "bf16_sums": Feature("gradient sums in bf16", {"optim.reduce_dtype": "bf16"}),
    "checkpointing": Feature("gradient checkpointing", {"model.gradient_checkpointing": True}),
    "selective": Feature("selective checkpointing", {"model.gradient_checkpointing": "selective"}),
    "offloading": Feature("activation offload", {"model.activation_offload": True}),
    "compile": Feature("`torch.compile`", {"model.compile": True}),
    "accumulation": Feature("gradient accumulation", {"batch.micro_size": 1}),
    "auto": Feature("`micro_size: auto`", {"batch.micro_size": "auto"}),
    "AdamW": Feature("AdamW", {"optim.name": "AdamW"}),
    "SGD": Feature("SGD", {"optim.name": "SGD"}),
    "LAMB": Feature("LARS, LAMB, Muon", {"optim.name": "LAMB"}),
    "free": Feature("ScheduleFreeAdamW", {"optim.name": "ScheduleFreeAdamW", "schedule.name": "constant"}),
    "Adafactor": Feature("Adafactor", {"optim.name": "Adafactor"}),
    "AdamW8bit": Feature("8-bit optimisers", {"optim.name": "AdamW8bit"}),
    "PagedAdamW": Feature("paged optimisers", {"optim.name": "PagedAdamW8bit"}),
    "own_optimizer": Feature("own optimiser", {"optim.name": "own_optimizers:TwoRates"}),
    "rates": Feature("rates by layer and module", {"optim.layer_decay": 0.9}),
    "average": Feature("average of weights (EMA)", {"optim.ema_decay": 0.9}),
    "evaluation": Feature("evaluation", {"eval.at_end": True}),
    "texts": Feature("metrics of texts", {"eval.metrics": ["f1"], "eval.prompts": [{"sample": 9}]}),
    "sampling": Feature("sampling", {"sample.prompt": "Once"}),
    "early": Feature("early stopping", {"eval.patience": 2, "eval.every_steps": 2}),
    "best": Feature("best model written", {"output.model": "best", "eval.every_steps": 2}),
    "resume": Feature("resume", {"resume.mode": "auto"}),
    "elsewhere": Feature("resume under another launch file", {"checkpoint.every_steps": 2}),
    "export": Feature("export", {"output.save_model": True}),
}

# ---------------------------------------------------------------- what is proven, and by which test

_TWO = "single ddp fsdp zero2 zero3"
_MOST = "single ddp fsdp hsdp zero1 zero2 zero3 zero3_offload"
_SPLIT = "sp fsdp_sp tp fsdp_tp fsdp_tp_sp"
_PLAIN = "AdamW fp32 documents evaluation"
_PARITY = "training/test_parity.py::test_{}_takes_the_single_process_path[{{}}]"
_SPLIT_RUNS = "distributed/test_split_runs.py::test_every_kind_takes_the_single_process_path[{}-%s]"
_GPU = "training/test_gpu.py::test_backends_take_the_single_process_path[{}-%s]"
_CHECKPOINTING = "models/test_activation_checkpointing.py::test_"
_EXPORT = "export/test_verify_export.py::test_merged_is_what_was_trained[%s-merged]"
_ANSWERS = "export/test_export_chat.py::test_answers_are_reproduced_and_end[%s_merged]"
_OPTIMIZERS = "optim/test_optimizers.py::test_"
_METRICS = "training/test_metrics.py::test_"
_SEARCH = "training/test_micro_batch_search.py::test_"


def _rows() -> Iterator[tuple[str, ...]]:
    """A test, the launches that it runs on, features that one of its runs has together, and that run's recipe.

    `{}` in the test is the launch. One process has no test of its own where the others are compared with it: it is then
    named by the launch that follows. A `=` before the launches says that it has. The recipe is a name in the test's
    module, and one in there; without, no test looks whether the run has these features.
    """
    fp32, every = _PARITY.format("fp32"), f"{_MOST} zero3_nvme {_SPLIT}"
    without_offload = f"single ddp fsdp hsdp zero1 zero2 zero3 {_SPLIT}"
    yield fp32, every, f"all {_PLAIN} sampling", "PARITY.adamw"
    yield fp32, every.replace(" hsdp", ""), f"accumulation all {_PLAIN} sampling", "PARITY.adamw"
    yield fp32, without_offload, "SGD all documents fp32", "PARITY.sgd"
    yield fp32, without_offload.replace(" hsdp", ""), "accumulation SGD documents fp32", "PARITY.sgd"
    yield fp32, "single ddp fsdp zero3 sp tp", "padded all AdamW fp32", "PARITY.padded"
    yield fp32, "single ddp fsdp zero3 sp tp", "wrapped all AdamW fp32", "PARITY.wrapped"
    yield _PARITY.format("bf16"), every, "bf16 all AdamW documents evaluation", "PARITY.bf16"
    sums = "training/test_gradient_sums.py::test_both_ways_take_the_single_process_path[{}-4]"
    yield sums, "hsdp", "accumulation SGD all documents fp32"
    halves = "training/test_gradient_sums.py::test_sums_in_bf16_are_near_those_in_fp32[{}]"
    yield halves, "single ddp fsdp zero1 zero2 zero3 tp", "bf16_sums SGD all documents fp32"
    adapters = "models/test_lora.py::test_same_path_on_every_backend[{}-%s]"
    yield adapters % "plain", _MOST, f"lora {_PLAIN} sampling", "ADAPTERS.plain"
    yield adapters % "dora", _MOST, f"dora dropout checkpointing {_PLAIN}", "ADAPTERS.dora"
    yield adapters % "nf4", _MOST, f"nf4 dropout {_PLAIN}", "ADAPTERS.nf4"
    several = _MOST.replace(" hsdp", "")
    yield adapters % "plain", several, f"accumulation lora {_PLAIN}", "ADAPTERS.plain"
    yield adapters % "nf4", several, f"accumulation nf4 {_PLAIN}", "ADAPTERS.nf4"
    yield adapters % "bf16", _TWO, "lora bf16 AdamW documents evaluation", "ADAPTERS.bf16"
    yield adapters % "nf4_bf16", _TWO, "nf4 bf16 AdamW documents evaluation", "ADAPTERS.nf4_bf16"
    yield adapters % "bert", _TWO, "lora classes padded AdamW fp32 evaluation", "ADAPTERS.bert"
    talks = "single ddp fsdp zero3"
    yield adapters % "chat", talks, f"lora dropout chat {_PLAIN} sampling", "TALKS.chat"
    yield adapters % "chat_nf4", talks, f"nf4 dropout checkpointing chat {_PLAIN} sampling", "TALKS.chat_nf4"
    yield _SPLIT_RUNS % "lora", "sp tp", f"lora {_PLAIN} accumulation", "SPLIT.lora"
    yield _SPLIT_RUNS % "qlora", "sp tp fsdp_tp", "nf4 bf16 AdamW documents evaluation", "SPLIT.qlora"
    yield _SPLIT_RUNS % "checkpointed", "sp tp", f"checkpointing all {_PLAIN} accumulation", "SPLIT.checkpointed"
    frozen = "models/test_frozen_weights.py::test_same_path_on_every_backend[{}-%s]"
    yield frozen % "freeze", _TWO, f"frozen all {_PLAIN}"
    yield frozen % "int8", _TWO, f"int8 {_PLAIN}"
    yield frozen % "stored_bf16", _TWO, "dora bf16 AdamW documents evaluation"
    networks = "models/test_architectures.py::test_same_path_on_every_backend[%s-{}]"
    yield networks % "bert", _TWO, "classes padded all AdamW fp32 evaluation", "ARCHITECTURES.bert"
    yield networks % "mlp", _TWO, "own_task all AdamW fp32 evaluation", "ARCHITECTURES.mlp"
    weighted = "training/test_pairs_and_weights.py::test_every_backend_takes_the_single_process_path[{}]"
    yield weighted, _TWO, "pairs weights classes padded all SGD fp32 evaluation accumulation"
    numbers = "training/test_regression.py::test_every_backend_takes_the_single_process_path[{}]"
    yield numbers, "single ddp fsdp zero3", "numbers padded all SGD fp32 evaluation accumulation"
    yield numbers, "single ddp fsdp zero3", "numbers padded lora AdamW fp32 evaluation accumulation"
    tagged = "training/test_token_classification.py::test_every_backend_takes_the_single_process_path[{}]"
    yield tagged, "single ddp fsdp zero3", "words weights padded all SGD fp32 evaluation accumulation"
    yield tagged, "single ddp fsdp zero3", "words padded lora AdamW fp32 evaluation accumulation"
    written = "training/test_seq2seq.py::test_every_backend_takes_the_single_process_path[{}]"
    yield written, "single ddp fsdp zero3", "targets padded all SGD fp32 evaluation accumulation"
    yield written, "single ddp fsdp zero3", "targets padded all AdamW fp32 texts sampling"
    yield written, "single ddp fsdp zero3", "targets padded lora AdamW fp32 evaluation accumulation"
    preferred = "training/test_preferences.py::test_pairs_take_the_single_process_path[{}-%s]"
    yield preferred % "every", "ddp fsdp zero2 zero3 fsdp_tp", "preferences chat documents all AdamW fp32 evaluation"
    yield preferred % "adapted", "ddp fsdp zero3", "preferences chat documents lora AdamW fp32 evaluation"
    smoothed = "training/test_weights_and_noise.py::test_every_backend_takes_the_single_process_path[{}]"
    together = "smoothing noise chat documents all SGD fp32 evaluation accumulation"
    yield smoothed, "single ddp fsdp zero3 sp fsdp_tp", together
    references = "training/test_preferences.py::test_every_reference_gives_the_same_losses[{}-%s_reference]"
    for kind in ("live", "named"):
        yield (
            references % kind,
            "single ddp fsdp zero3 fsdp_tp sp",
            "preferences chat documents lora AdamW fp32 evaluation",
        )
    taught = "training/test_distill.py::test_a_student_takes_the_single_process_path[{}-distill_%s]"
    yield taught % "chat", "ddp fsdp zero3", "teacher chat documents all AdamW fp32 evaluation"
    yield taught % "live", "ddp fsdp zero3", "teacher documents all AdamW fp32 evaluation"
    yield taught % "live_of_1", "=single", "teacher documents all AdamW fp32 evaluation accumulation"
    plain_loop = "training/test_preferences.py::test_the_path_is_that_of_a_plain_loop[sft]"
    yield plain_loop, "single", "preferences chat documents all AdamW fp32 evaluation"
    embedded = "training/test_embedding.py::test_embeddings_take_the_single_process_path[{}-%s]"
    yield embedded % "embedding-embedding", "ddp fsdp zero3", "embedding padded all AdamW fp32 evaluation accumulation"
    adapted = "embedding_symmetric"
    yield (
        embedded % f"{adapted}-{adapted}",
        "ddp fsdp zero3",
        "embedding padded lora AdamW fp32 evaluation accumulation",
    )
    own = "training/test_embedding.py::test_"
    yield (
        f"{own}the_path_is_that_of_a_plain_loop[mean-True-True]",
        "single",
        "embedding padded all AdamW fp32 evaluation",
    )
    yield f"{own}files_are_those_of_sentence_transformers", "single", "embedding export"
    checkpointed = "ARCHITECTURES.llama_checkpointed"
    yield networks % "llama_checkpointed", _TWO, f"checkpointing all {_PLAIN}", checkpointed
    fp8 = "fp8 bf16 checkpointing all AdamW documents evaluation"
    yield "models/test_float8.py::test_backends_take_the_single_process_path[{}]", "single ddp fsdp", fp8, "JOBS.fp8"
    yield "models/test_float8.py::test_recomputed_is_the_same[selective]", "single", "fp8 bf16 selective"
    stopped = "models/test_float8.py::test_a_stopped_run_goes_on_and_its_model_is_a_plain_one"
    yield stopped, "single", "fp8 bf16 resume export"
    yield f"{_CHECKPOINTING}selective_recomputes_the_cheap_and_keeps_the_dear", "single", "selective all fp32"
    yield f"{_CHECKPOINTING}offloaded_activations_come_back", "single", "offloading all fp32"
    stop, backends = "checkpoint/test_resume_matrix.py::test_a_stop_changes_nothing[%s-{}]", f"={_MOST} {_SPLIT}"
    yield stop % "adamw", backends, f"resume elsewhere all {_PLAIN}", "KINDS.adamw"
    yield stop % "dora", f"={_MOST}", f"resume elsewhere dora dropout {_PLAIN}", "KINDS.dora"
    yield stop % "lora", f"=single {_SPLIT}", f"resume elsewhere lora {_PLAIN}", "KINDS.lora"
    yield stop % "averaged", f"={_MOST} tp", f"average rates resume elsewhere all {_PLAIN}", "KINDS.averaged"
    yield "distributed/test_state_transfer.py::test_goes_on_from_the_disk", "zero3_nvme", "resume elsewhere AdamW"
    early = "checkpoint/test_early_stopping.py::test_a_resumed_run_ends_where_it_would_have_ended[crash_after-3]"
    yield early, "single", "early resume evaluation own_task"
    yield (
        early.replace("ends_where_it_would_have_ended", "writes_the_same_model"),
        "single",
        "best early resume own_task",
    )
    kinds = "training/test_every_launch_kind.py::test_the_best_model_is_written[{}]"
    yield kinds, f"{_MOST} {_SPLIT}", "best all AdamW fp32 documents", "JOBS.full"
    yield kinds, "single ddp fsdp zero1 zero2 zero3 zero3_offload sp tp", "best lora AdamW fp32 documents", "JOBS.lora"
    yield f"{_METRICS}all_ranks_end_together[{{}}]", "single fsdp zero3", "early evaluation own_task", "ALL.early"
    yield f"{_METRICS}every_backend_predicts_alike[{{}}]", "=single fsdp zero3", "texts evaluation", "ALL.texts"
    yield f"{_METRICS}ranks_that_share_layers_write_the_same_texts", "tp", "texts evaluation", "ALL.texts"
    yield f"{_SEARCH}the_path_is_that_of_the_number", "fsdp", "auto all AdamW documents fp32"
    yield f"{_SEARCH}one_rank_without_memory_speaks_for_all[{{}}]", "ddp zero2", "auto own_task"
    one_path = f"{_OPTIMIZERS}layerwise_optimisers_take_one_path[{{}}]"
    yield one_path, "single ddp fsdp hsdp", "LAMB own_task elsewhere"
    yield one_path, "single ddp fsdp hsdp", "own_optimizer own_task elsewhere"
    yield one_path, "single ddp fsdp hsdp", "free own_task elsewhere"
    flat_buffers = "optim/test_rates_and_averages.py::test_free_of_schedules_in_flat_buffers[{}]"
    yield flat_buffers, "single zero1 zero2 zero3", "free own_task fp32", "RUNS.free"
    bits = f"{_OPTIMIZERS}a_stopped_run_of_these_goes_on_bit_for_bit"
    yield f"{bits}[lamb]", "single", "LAMB own_task resume"
    yield f"{bits}[rates]", "single", "own_optimizer own_task resume"
    yield f"{_OPTIMIZERS}a_stopped_run_goes_on_bit_for_bit[AdamW8bit]", "single", "AdamW8bit own_task resume"
    fake = "training/test_fake_device.py::test_a_backend_takes_the_cpus_path_and_waits_for_nothing[{}]"
    yield fake, "fsdp_offload", f"all {_PLAIN} sampling accumulation resume"
    half = "training/test_fake_device.py::test_half_precision_takes_kernels_and_loss_scaling"
    yield half, "single", "fp16 all AdamW documents evaluation sampling accumulation"
    yield _GPU % "fp16", "fsdp zero2 zero3 zero3_offload", "fp16 all AdamW documents evaluation sampling", "JOBS.fp16"
    yield _GPU % "bf16", "fsdp_offload", "bf16 all AdamW documents evaluation sampling", "JOBS.bf16"
    for name, feature in {"full": "all", "lora": "lora", "dora": "dora", "qlora": "nf4", "int8": "int8"}.items():
        yield _EXPORT % name, "single", f"export {feature}"
    twice = "export/test_export_kinds.py::test_checkpoints_of_two_processes[{}-%s]"
    yield twice % "full", "fsdp zero3", "export all AdamW fp32 documents", "JOBS.full"
    yield twice % "lora", "fsdp zero3", "export dora AdamW fp32 documents", "JOBS.lora"
    yield "export/test_export_kinds.py::test_classifiers[bert-lora0]", "single", "export classes"
    yield _ANSWERS % "full", "single", "export all chat padded"
    yield _ANSWERS % "lora", "single", "export lora chat padded"
    went_on = "models/test_frozen_weights.py::test_a_run_with_frozen_parts_goes_on_and_is_exported"
    yield went_on, "single", "frozen all resume export"
    stages = "distributed/test_sequence_parallel.py::test_stages_split_rows_too[{}]"
    yield stages, "zero1+sp zero2+sp zero3+sp", "all accumulation SGD documents fp32", "SPLIT.accumulates"


PROOFS = tuple(_rows())
PLACES = {"test_gpu.py": "a GPU", "test_fake_device.py": "a [fake device](gpu.md#the-fake-device)"}
"""Where tests run that need something else than a CPU."""

# ---------------------------------------------------------------- what is planned, and what never will be

PLANNED = {
    "pipeline parallelism (`pp_size`)": "Layers of a network on ranks one behind the other.",
    "expert parallelism (`ep_size`)": "Experts of a mixture on ranks of their own.",
    "streamed data": "Rows whose number is not known when a run starts.",
    "checkpoints in object storage": "Beside the local directory.",
    "preference training": "Pairs of answers of which one is preferred.",
}
NEVER = {
    "Trainer class, callbacks, registries": "One loop in one file (ARCHITECTURE.md).",
    "pickled checkpoints": "Loading one runs its code; weights and state are safetensors, the rest JSON.",
}
OTHER_LAUNCHES: dict[str, dict[str, Any]] = {
    "FSDP version 1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}},
    "Megatron-LM": {"distributed_type": "MEGATRON_LM"},
    "TPUs": {"distributed_type": "XLA"},
    "Accelerate's dynamo": {"distributed_type": "MULTI_GPU", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
}
"""Launch files that are refused, for good."""
# A custom task does not read sources or the default of `data.packing`, and computes in fp8 if its own code asks for it.
UNREAD = frozenset(frozenset(("own_task", name)) for name in ("documents", "fp8", "pairs"))
UNREAD_REASON = "A custom task builds data and network itself, and does not read the key."

# ---------------------------------------------------------------- marks


@dataclass(frozen=True)
class Mark:
    """What is known of a pair."""

    kind: str
    """proven, works, gpu (works, on a GPU alone), refused, never, or blank: no pair to ask about."""
    why: str = ""
    """The test, or the reason."""


@cache
def proofs() -> dict[frozenset[str], str]:
    """The first test of each pair of a launch and a feature, or of two features."""
    found: dict[frozenset[str], str] = {}
    for test, launches, features, *_ in PROOFS:
        names = launches.removeprefix("=").split()
        tests = {name: f"tests/{test.format(name.partition('+')[0])}" for name in names}
        if names[0] == "single" and not launches.startswith("=") and "{}" in test:
            tests["single"] = tests[names[1]]
        for launch, feature in itertools.product(names, features.split()):
            found.setdefault(frozenset((launch, feature)), tests[launch])
        for pair in itertools.combinations(features.split(), 2):
            found.setdefault(frozenset(pair), tests[names[0]])
    return found


def quick_proofs() -> set[str]:
    """A test of each feature that needs no GPU: under FSDP2 where there is one, since those share a launch."""
    chosen: set[str] = set()
    covered: set[str] = set()
    shown = [(*row[:2], set(row[2].split())) for row in PROOFS if "test_gpu" not in row[0]]
    # The last features come with others.
    for feature in reversed(FEATURES):
        rows = [row for row in shown if feature in row[2]]
        if feature in covered or not rows:
            continue
        test, launches, features = next((row for row in rows if "fsdp" in row[1].split()), rows[0])
        names = launches.removeprefix("=").split()
        chosen.add(f"tests/{test.format('fsdp' if 'fsdp' in names else names[-1])}")
        covered |= features
    return chosen


def mark(launch: str, *names: str) -> Mark:
    """Looks at one or two features under a launch file."""
    features = [FEATURES[name] for name in names]
    pair = frozenset(names if len(names) > 1 else (launch, *names))
    if len(features) == 2 and _is_blank(*features):
        return Mark("blank")
    if pair in UNREAD:
        return Mark("never", UNREAD_REASON)
    refused = refusal(launch, *features, gpus=0)
    needs_gpu = refused is not None
    if needs_gpu:
        refused = refusal(launch, *features, gpus=8)
    test = proofs().get(pair)
    if refused is not None:
        assert test is None, f"{test} proves {launch} with {names}, which is refused: {refused}"
        return Mark("refused", refused)
    if test is not None:
        return Mark("proven", test)
    return Mark("gpu" if needs_gpu else "works")


def _is_blank(one: Feature, other: Feature) -> bool:
    """Whether two features are two values of one key, or one is a part of the other."""
    for key, value in one.keys.items():
        for name, second in other.keys.items():
            nested = f"{name}.".startswith(f"{key}.") or f"{key}.".startswith(f"{name}.")
            if nested and (key, value) != (name, second):
                return True
    return one.keys.items() <= other.keys.items() or other.keys.items() <= one.keys.items()


def refusal(launch: str, *features: Feature, gpus: int) -> str | None:
    """What a dry run refuses features with, on a machine with so many GPUs; None where it does not."""
    tree = base(model={"config": {**LLAMA, "hidden_size": 128, "intermediate_size": 256}})
    tree["optim"] = {"name": "AdamW"}
    for part in (*(feature.given for feature in features), *(feature.keys for feature in features)):
        for key, value in part.items():
            section, _, name = key.rpartition(".")
            if section:
                tree[section] = {**(tree.get(section) or {}), name: value}
            else:
                tree[key] = value
    try:
        with machine(gpus):
            recipe = validate_recipe(tree)
            describe(recipe, _foreseen(launch))
            if FEATURES["export"] in features:
                source_head(SimpleNamespace(recipe=recipe, weights="DIR/model"))
    except FinetuneError as error:
        said, name = _said(str(error)), tree["optim"]["name"]
        return said if name == "AdamW" else said.replace(name, "NAME")
    return None


@contextlib.contextmanager
def machine(gpus: int) -> Iterator[None]:
    """Has code that asks torch see so many GPUs; works from the repository's root."""
    import torch

    answers = {"is_available": gpus > 0, "device_count": gpus, "is_bf16_supported": True}
    with contextlib.ExitStack() as stack, contextlib.chdir(ROOT):
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, answer=answer, **__: answer))
        # By which a CUDA build of torch asks the driver, which is not there.
        check = "_accelerator_graph_capture_health_check"
        stack.enter_context(mock.patch.object(torch.optim.Optimizer, check, return_value=None))
        yield


@cache
def _foreseen(launch: str) -> Any:
    """The launch of a file, or of one with a size added: `zero1+sp`."""
    name, _, layout = launch.partition("+")
    file = Path("accelerate_configs") / f"{name}.yaml"
    if not layout:
        return predict_environment(str(file), {}, {})
    size = {f"parallelism_config_{layout}_size": 2}
    tree = yaml.safe_load(file.read_text())
    return _read({**tree, "num_processes": 4, "parallelism_config": {**tree.get("parallelism_config", {}), **size}})


def _read(tree: dict[str, Any]) -> Any:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml", prefix="launch-") as file:
        yaml.safe_dump(tree, file)
        file.flush()
        return predict_environment(file.name, {}, {})


def _said(text: str) -> str:
    """A message without the names of launch files, so that what is refused for one reason has one number."""
    text = re.sub(r"^\S+\.(yaml|json)(:\d+)?(:? )", r"The launch file\3", text)
    return " ".join(re.sub(r"/\S*/launch-\w+\.yaml(:\d+)?", "the launch file", text).split())


def refused_launches() -> dict[str, str]:
    """What each of the other launch files is refused with."""
    found = {}
    for name, changes in OTHER_LAUNCHES.items():
        with machine(8), contextlib.suppress(FinetuneError):
            try:
                _read({"num_machines": 1, "num_processes": 2, **changes})
            except FinetuneError as error:
                found[name] = _said(str(error))
    return found


# ---------------------------------------------------------------- the page

_SHOWN = {"works": "+", "gpu": "GPU", "blank": "", "planned": "later"}
HEAD = """# Support matrix

Look up here whether two things go together before you write a recipe. `make support-matrix` writes this page from
`tests/support/support_matrix.py`; refusals are what a dry run of the pair says, and tests compare the page with that.

| mark | meaning |
|---|---|
| P1, P2, … | proven by this [test](#tests) |
| + | works as far as is known: a dry run refuses nothing, and no test shows it |
| GPU | the same, and refused on a machine without a GPU |
| R1, R2, … | refused, for this [reason](#reasons), in which NAME is the optimiser |
| N1, … | never: the pair has no meaning, for this [reason](#reasons) |
| later | [planned](#planned-and-never) |
| empty | two values of one key, or one contains the other |

A run looks closer than a dry run: it also ends before its first step where what runs is not what was asked.

What ran on real GPUs, by hand, is in [GPUs](gpu.md); every pair of launch files for a stop and a resume in
[Resume matrix](resume-matrix.md).
"""


def page() -> str:
    """The page, as Markdown."""
    known: dict[str, dict[str, int]] = {"proven": {}, "refused": {}, "never": {}}

    def cell(found: Mark) -> str:
        if found.kind not in known:
            return _SHOWN[found.kind]
        # One number for a test, whatever launch it is asked about.
        why = re.sub(r"\[[^]]*\]$", "", found.why) if found.kind == "proven" else found.why
        return f"{found.kind[0].upper()}{known[found.kind].setdefault(why, len(known[found.kind]) + 1)}"

    lines = [HEAD, "## Features and launch files", "", _row("", *LAUNCHES), _rule(len(LAUNCHES))]
    for name, feature in FEATURES.items():
        lines.append(_row(feature.title, *(cell(mark(launch, name)) for launch in LAUNCHES)))
    lines += [
        "",
        "## Launch files and split rows or layers",
        "",
        "On four processes, of a Llama whose weights are all trained.",
    ]
    layouts = ("sp", "tp", "cp")
    lines += ["", _row("", *(f"`{size}_size: 2`" for size in layouts), "`pp_size`", "`ep_size`"), _rule(5)]
    for launch in LAYOUTS:
        lines.append(_row(launch, *(cell(layout(launch, size)) for size in layouts), "later", "later"))
    names = list(FEATURES)
    lines += ["", "## Features and features", "", "On one process. Columns are numbered as rows are.", ""]
    lines += [_row("", *map(str, range(1, len(names)))), _rule(len(names) - 1)]
    for number, name in enumerate(names):
        row = [cell(mark("single", other, name)) for other in names[:number]]
        lines.append(_row(f"{number + 1} {FEATURES[name].title}", *row, *[""] * (len(names) - 1 - number)))
    lines += ["", "## Tests", ""]
    for test, number in known["proven"].items():
        where = next((f", on {place}" for name, place in PLACES.items() if f"/{name}" in test), "")
        lines.append(f"- P{number}: `{test}`{where}")
    lines += ["", "## Reasons", ""]
    lines += [f"- R{number}: {reason}" for reason, number in known["refused"].items()]
    lines += [f"- N{number}: {reason}" for reason, number in known["never"].items()]
    lines += ["", "## Planned and never", "", _row("", "mark", "what"), _rule(2)]
    lines += [_row(name, "later", why) for name, why in PLANNED.items()]
    lines += [_row(name, "never", why) for name, why in NEVER.items()]
    lines += [_row(name, "refused", why) for name, why in refused_launches().items()]
    return "\n".join(lines) + "\n"


def layout(launch: str, size: str) -> Mark:
    """`mark` of a launch file with a size added."""
    try:
        with machine(8):
            _foreseen(f"{launch}+{size}")
    except FinetuneError as error:
        return Mark("refused", _said(str(error)))
    same = {"ddp+sp": "sp", "ddp+tp": "tp", "fsdp+sp": "fsdp_sp", "fsdp+tp": "fsdp_tp"}
    return mark(same.get(f"{launch}+{size}", f"{launch}+{size}"), "all")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return f"|{'---|' * (columns + 1)}"


if __name__ == "__main__":
    testdata.ensure()
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")

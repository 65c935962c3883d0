"""`finetune plan --trace`: what a step allocates under fake tensors is what a real one does."""

import functools
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from forkserver import ForkServer
from harness import ROOT
from peak_worker import peak_of
from recipes_for_tests import UNEVEN

from finetune.cli import main
from finetune.config.recipe import validate_recipe
from finetune.distributed import gpu_specs
from finetune.models.build_network import build_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.optim.optimizers import build_optimizer
from finetune.planning import planner
from finetune.planning.step_time import Machines
from finetune.planning.trace import trace_launches
from finetune.planning.trace.trace_launches import Traced
from finetune.tasks.task_lookup import find_task

SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}
# Ranks can share its rows and layers, also where blocks of 64 weights of 4 bits share a scale.
DIVISIBLE = {
    **UNEVEN,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
LORA = {"lora": {"rank": 5}}
VOCABULARY, TOKENS = 512, 256


def sections(config: dict[str, Any], *, micro: int = 2, rows: int = 12, **changed: Any) -> dict[str, Any]:
    return {
        "model": {"config": config, **changed.pop("model", {})},
        "tokenizer": {"vocab_size": VOCABULARY},
        "data": {"train": [{"sample": 3}], "sequence_length": TOKENS, "packing": changed.pop("packing", "wrapped")},
        "batch": {"global_size": rows, "micro_size": micro},
        "length": {"steps": 1},
        "precision": "bf16",
        **changed,
    }


@pytest.fixture(autouse=True)
def forks(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks trace, which need not import everything anew; `test_the_command` starts a real process once."""

    def run(words: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        code, output = fork_server.run(words[1:], env=env)
        return subprocess.CompletedProcess(words, code, "", output)

    monkeypatch.setattr(trace_launches, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))


def trace(recipe: dict[str, Any], name: str = "single", ranks: int = 1) -> Traced:
    return _trace(json.dumps(recipe, sort_keys=True), name, ranks)


@functools.cache
def _trace(recipe: str, name: str, ranks: int) -> Traced:
    machines = Machines(gpu_specs.find_gpu("h100-80gb"), ranks, 1, 50.0, 0.4)
    plan = planner.make_plan(validate_recipe(json.loads(recipe)), machines)
    (found,) = trace_launches.trace_all(plan, trace_launches.find_wanted(plan, name), None, lambda _: None)
    return found


@pytest.mark.parametrize(
    ("way", "name", "ranks"),
    [
        ("full", "single", 1),
        ("full", "ddp", 2),
        ("full", "fsdp", 4),
        ("full", "hsdp", 4),
        ("full", "fsdp_sp", 4),
        ("full", "tp", 2),
        ("full", "fsdp_tp", 4),
        ("LoRA", "fsdp_tp", 4),
        ("nf4", "tp", 2),
        ("LoRA", "ddp", 2),
        ("LoRA", "fsdp", 4),
        ("nf4", "fsdp", 4),
        ("int8", "single", 1),
    ],
)
def test_state_is_what_the_formulas_say(way: str, name: str, ranks: int) -> None:
    """Weights, gradients and the optimiser's state, to the byte."""
    more: dict[str, Any] = {} if way == "full" else dict(LORA)
    if way in ("nf4", "int8"):
        more["model"] = {"quantization": way}
    # Two ranks each share rows or layers; one micro-batch a step.
    config, rows = (DIVISIBLE, ranks // 2) if name.endswith(("sp", "tp")) else (UNEVEN, ranks)
    found = trace(sections(config, micro=1, rows=rows, **more), name, ranks)
    assert not found.reason
    memory = found.candidate.memory
    assert memory is not None
    assert found.state == {
        "weights": memory.frozen + memory.trained,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }


def test_the_peak_grows_with_rows_and_falls_where_layers_are_recomputed() -> None:
    one, two, three = (trace(sections(SMALL, micro=micro, rows=micro)) for micro in (2, 3, 4))
    assert one.peak < two.peak < three.peak
    # Each row takes as much; casts of weights do not grow.
    first, second = two.peak - one.peak, three.peak - two.peak
    assert first == pytest.approx(second, rel=0.001)
    again = trace(sections(SMALL, micro=4, rows=4, model={"gradient_checkpointing": True}))
    assert again.parts["activations"] < three.parts["activations"] / 2
    assert again.peak < three.peak
    assert again.state == three.state


def test_documents_in_a_row_take_a_mask() -> None:
    more = {"micro": 4, "rows": 4, "model": {"attention": "sdpa"}}
    wrapped, documents = (trace(sections(SMALL, **more, packing=p)) for p in ("wrapped", "documents"))
    # One in 16 bit for each layer, and keys and values for all heads.
    assert documents.parts["activations"] - wrapped.parts["activations"] > 2 * 4 * TOKENS**2


GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": TOKENS}
BERT = {
    "model_type": "bert",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
CLASSES = {"task": {"name": "sequence_classification", "num_labels": 3}, "packing": "padded"}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (SMALL, {}),
        (SMALL, LORA),
        (GPT2, {}),
        (GPT2, LORA),
        (BERT, CLASSES),
        (SMALL, {"lora": {"rank": 5, "dora": True}}),
        (SMALL, {"lora": {"rank": 5, "dropout": 0.1}}),
        (SMALL, {"lora": {"rank": 5, "dropout": 0.1}, "precision": "fp32"}),
    ],
    ids=["full", "LoRA", "GPT-2", "GPT-2 LoRA", "BERT", "DoRA", "dropout", "dropout fp32"],
)
@pytest.mark.parametrize("again", [False, True])
def test_formulas_agree(config: dict[str, Any], more: dict[str, Any], again: bool) -> None:
    """GPT-2 and BERT have dropout, for which a GPU's attention keeps nothing."""
    found = trace(sections(config, micro=4, rows=4, model={"gradient_checkpointing": again}, **more))
    assert found.difference is not None
    assert abs(found.difference) < found.candidate.margin


@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "LoRA"])
@pytest.mark.parametrize("again", [False, True])
def test_a_real_step_allocates_as_much(more: dict[str, Any], again: bool) -> None:
    """The optimiser has its state, as in all steps but the first."""
    asked = sections(SMALL, micro=4, rows=4, model={"gradient_checkpointing": again}, **more)
    recipe = validate_recipe(asked)
    config = resolve_model_config(recipe, vocab_size=VOCABULARY)
    caller = ForwardWrapper(build_model(recipe, config, NEXT_TOKEN))
    caller.autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    optimizer = build_optimizer(caller, recipe)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    ids = torch.zeros(4, TOKENS, dtype=torch.long)
    held = [*caller.parameters(), *caller.buffers(), ids, ids]
    held += [value for state in optimizer.state.values() for value in state.values()]

    def step() -> None:
        caller(find_task(recipe).loss_sum, {"input_ids": ids, "targets": ids}).backward()
        torch.nn.utils.clip_grad_norm_(caller.parameters(), 1.0)
        optimizer.step()

    assert trace(asked).peak == pytest.approx(peak_of(step, sum(t.nbytes for t in held)), rel=0.01)


@pytest.mark.parametrize(
    ("name", "rows"), [("ddp", 4), ("ddp", 8), ("fsdp", 8), ("fsdp_grad_op", 4), ("sp", 4), ("tp", 4)]
)
def test_real_ranks_allocate_as_much(fork_server: ForkServer, name: str, rows: int, tmp_path: Path) -> None:
    """Two processes on gloo, of which rank 0 is looked at; with 8 rows, micro-batches add up."""
    asked, source, result = sections(SMALL, rows=rows), tmp_path / "recipe.json", tmp_path / "peak.json"
    source.write_text(json.dumps(asked))
    code, output = fork_server.launch(name, source, result, script="tests/support/peak_worker.py", processes=2)
    assert code == 0, output
    found = trace(asked, name, 2)
    assert found.peak == pytest.approx(json.loads(result.read_text()), rel=0.01)
    assert found.difference is not None
    assert abs(found.difference) < found.candidate.margin


@pytest.mark.parametrize(
    ("name", "more"),
    # With many rows, the loss is much of the peak.
    [("fsdp_sp", {}), ("fsdp_tp", LORA), ("fsdp_tp", {**LORA, "rows": 16, "micro": 8}), ("fsdp_tp_sp", {})],
    ids=["rows", "layers", "tokens of the loss", "both"],
)
def test_formulas_agree_on_four_ranks_that_split_rows_or_layers(name: str, more: dict[str, Any]) -> None:
    found = trace(sections(SMALL, **{"rows": 4, **more}), name, 4)
    assert found.difference is not None
    assert abs(found.difference) < found.candidate.margin


def test_shards_are_gathered_for_a_while() -> None:
    """FSDP2 holds units that it gathers, all of them if they are not freed; DDP holds buckets of all gradients."""
    recipe = sections(SMALL, rows=8)
    whole, cut, kept = (trace(recipe, name, 4) for name in ("ddp", "fsdp", "fsdp_grad_op"))
    assert whole.parts["gathered"] == 0
    assert whole.parts["gradients"] == whole.state["weights"] - whole.parts["buffers"]
    assert 0 < cut.parts["gathered"] < kept.parts["gathered"]
    assert cut.peak < kept.peak < whole.peak


def test_what_cannot_be_imagined_keeps_its_own_parts() -> None:
    # Both at the loss, their fullest moment.
    recipe = sections(SMALL, rows=8, model={"loss": "plain"})
    alone, cut = trace(recipe, "zero2", 4), trace(recipe, "fsdp", 4)
    assert "DeepSpeed cannot run without its other ranks" in alone.reason
    assert alone.candidate.parts is not None
    for part in ("weights", "gradients", "optimizer", "gathered", "buckets"):
        assert alone.parts[part] == alone.candidate.parts[part]
    assert alone.parts["activations"] == pytest.approx(cut.parts["activations"] + cut.parts["temporary"], rel=0.05)


def test_split_rows_under_deepspeed_are_not_traced() -> None:
    plan = planner.make_plan(
        validate_recipe(sections(SMALL, rows=8)), Machines(gpu_specs.find_gpu("h100-80gb"), 4, 1, 50.0, 0.4)
    )
    (candidate,) = trace_launches.find_wanted(plan, "zero2")
    split = replace(candidate, launch=replace(candidate.launch, sequence=2))
    (found,) = trace_launches.trace_all(plan, [split], None, lambda _: None)
    assert not found.parts
    assert "without its other ranks, and its ranks exchange parts of rows" in found.reason


def test_casts_of_weights_are_kept_where_layers_are_not_freed() -> None:
    # In the forward pass: with so few rows that it is the larger half.
    recipe = sections(SMALL, micro=1, rows=8, model={"gradient_checkpointing": True})
    kept, freed = (trace(recipe, name, 4).parts["activations"] for name in ("zero2", "zero3"))
    layer = 2 * 256 * 256 + 2 * 64 * 256 + 3 * 256 * 704
    assert kept - freed > 2 * 3 * layer


def own(task: str) -> dict[str, Any]:
    recipe = sections({"model_type": "llama"}, micro=4, rows=4, precision="fp32", packing="documents")
    return {**recipe, "model": {}, "tokenizer": {}, "task": {"name": task}}


def test_a_task_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/support")
    found = trace(own("own_task:mlp"))
    elements = 8 * 32 + 32 + 32 * 32 + 32 + 32 + 1
    assert found.state == {"weights": 4 * elements, "gradients": 4 * elements, "optimizer": 8 * elements}


@pytest.mark.parametrize(
    ("task", "words"),
    [("reads", "aten._local_scalar_dense.default needs values"), ("ends", "the process that traces it ended")],
)
def test_what_cannot_be_traced_is_one_paragraph(
    task: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/tests/support")
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(own(f"untraceable_task:{task}")))
    assert main.main(["plan", str(file), "--gpus", "1", "--trace", "single"]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in out.splitlines() if "cannot be traced" in line]
    assert words in line
    assert "Tier 1 stands" in line
    assert "Traceback" not in out + err


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(sections({**SMALL, "num_hidden_layers": 1}, rows=8)))
    words = ["plan", str(file), "--gpus", "4"]
    with monkeypatch.context() as real:
        real.setattr(trace_launches, "subprocess", subprocess)
        assert main.main([*words, "--trace"]) == 0
    out, err = capsys.readouterr()
    recommended = out.split("Recommended: accelerate_configs/")[1].split(".yaml")[0]
    assert f"\n{recommended} (full) " in out.split("Traced: ")[1]
    assert "tracing" not in err  # which is no terminal here
    assert main.main([*words, "--trace", "fsdp,zero2", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["traced"]
    assert (first["launch"], second["launch"]) == ("fsdp", "zero2")
    assert first["peak"] == sum(first["parts"].values())
    assert first["difference"] == pytest.approx(first["predicted"] / first["peak"] - 1)
    assert main.main([*words, "--trace", "zero9"]) == 2
    assert "the plan has no launch file 'zero9', but ddp, " in capsys.readouterr().err

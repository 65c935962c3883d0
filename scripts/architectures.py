"""Tries every causal language model of transformers in a tiny size, and writes docs/architectures.md.

    python scripts/architectures.py                 # all of them; goes on where it was stopped
    python scripts/architectures.py llama opt       # some of them, shown and not written

It takes about 20 minutes on two cores. Each network gets weights that are larger than first weights are, so that what
attention does is seen in the scores. Scores of packed rows are compared with those of each document alone, computed by
transformers' own attention and told nothing; the loss and its gradients with those of all logits. Then two steps are
taken in one process, and under FSDP2 in two.
"""

import argparse
import gc
import json
import logging
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "architectures.md"
RESULTS = ROOT / "runs" / "architectures"
VOCABULARY = 320
WIDTH = 64
"""Tokens of a row."""
_HIDDEN, _HEADS, _HEAD_WIDTH, _WINDOW = 32, 4, 8, 16

# What is left of a size, by what architectures call it.
_SIZES = {
    r"(.*_)?vocab_size(_per_layer_input|_base)?|.*_hash_byte_group_vocab": VOCABULARY,
    r"hidden_size(_global)?|d_model|n_embd|emb_dim|embedding_dim|word_embed_proj_dim|(input_|output_)?embedding_size"
    r"|adapter_(in|out)_dim|adapter_input_size|lru_width|attention_hidden_size|backbone_hidden_size|ple_embed_dim"
    r"|(shape|pronunciation)_embed_dim": _HIDDEN,
    r"num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|num_(en|de)coder_layers|num_blocks"
    r"|num_layers_per_stack": 2,
    r"(swa_)?num_attention_heads|n_heads?|num_heads|((en|de)coder_)?attention_heads|num_(en|de)coder_attention_heads"
    r"|linear_num_heads|linear_num_value_heads|index_n_heads": _HEADS,
    r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|linear_num_key_heads|heads_per_ngram|o_groups": 2,
    r"(swa_|index_|linear_|linear_key_|linear_value_|global_)?head_dim|d_head|dim_head|kv_channels|rotary_dim"
    r"|(qk_nope|qk_rope|v)_head_dim|attention_head_size|query_pre_attn_scalar": _HEAD_WIDTH,
    r"qk_head_dim|attention_head_dim": 2 * _HEAD_WIDTH,
    r".*intermediate_size(_mlp)?|.*ffn_dim|.*ffn_hidden_size|feed_forward_size|d_inner|dff|dim_ff": 2 * _HIDDEN,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|model_max_length|max_(source|target)_positions"
    r"|original_max_position_embeddings": 2 * WIDTH,
    r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num": 4,
    r"num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k": 2,
    r"n_group|topk_group|num_expert_group|num_kv_shared_layers": 1,
    r".*_lora_rank|laurel_rank|adapter_rank|gated_norm_rank|hc_lowrank|router_hidden_size"
    r"|hidden_size_per_layer_input": 16,
    r"first_k_dense_replace|num_dense_layers|moe_layer_start_index": 1,
    # Less than a row, so that what they do is seen.
    # (Not of attention that chooses keys by their scores: equal scores are chosen from by place.)
    r"(attention_)?(sliding_)?window(_size)?|sliding_window_size|local_attention|attention_chunk_size"
    r"|local_attention_window_len|chunk_size|mamba_chunk_size": _WINDOW,
}
_PATTERNS = [(re.compile(pattern), most) for pattern, most in _SIZES.items()]
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

# What no rule gives.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_KEPT_IN_LAYERS = {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
_INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 2 * WIDTH}
_BOTH = ["sliding_attention", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": _MAMBA,
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "cwm": {"eos_token_id": 2},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"layer_types": ["indexed_attention"] * 2},
    "gemma3n_text": {**_KEPT_IN_LAYERS, "layer_types": _BOTH, "intermediate_size": [64] * 4}
    | {"activation_sparsity_pattern": [0.95] * 4},
    "gemma4_text": {**_KEPT_IN_LAYERS, "layer_types": _BOTH},
    "gemma4_unified_text": {**_KEPT_IN_LAYERS, "layer_types": _BOTH},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": _HEAD_WIDTH},
    "hunyuan_v1_moe": {"head_dim": _HEAD_WIDTH},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": _HEAD_WIDTH},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {**_INDEXED, "indexer_compress_ratio": 4},
    "reformer": {"is_decoder": True, "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [8, 24]},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 2 * _HIDDEN, "num_hidden_layers": 4}
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"attention_hidden_size": 2 * _HIDDEN, "num_hidden_layers": 4}
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}


def small(model_type: str) -> dict[str, Any]:
    """The sizes of a tiny network of an architecture, in its own words: `model.config` of a recipe."""
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(model_type).to_dict()
    except Exception:  # the run says it better
        default = {}
    return {"model_type": model_type, **_small(default), **_OWN.get(model_type, {})}


def _small(values: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    all_layers = next((values[key] for key in _LAYERS if isinstance(values.get(key), int)), 0)
    kinds = list(dict.fromkeys(values.get("layer_types") or values.get("layers_block_type") or ()))
    layers = max(2, len(kinds))
    special = iter(range(3, 60))
    for key, value in values.items():
        if isinstance(value, dict):
            if key.endswith("_config") and key != "quantization_config":
                inner = {"model_type": value["model_type"]} if value.get("model_type") else {}
                found[key] = inner | _small(value) | _OWN.get(value.get("model_type", ""), {})
        elif isinstance(value, list) and value and len(value) == all_layers:
            found[key] = _few(key, value, layers)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            if key.endswith(("_token_id", "_token_index")):
                found[key] = value if value < 60 else next(special)
            elif key in _LAYERS:
                found[key] = layers
            else:
                most = next((most for pattern, most in _PATTERNS if pattern.fullmatch(key)), None)
                if most is not None:
                    found[key] = most if "vocab" in key else min(value, most)
    if "is_decoder" in values:
        found["is_decoder"] = True
    if "qk_rope_head_dim" in found and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _few(key: str, values: list[Any], layers: int) -> list[Any]:
    """A list with an item a layer, shortened: one layer of each kind first."""
    if isinstance(values[0], str):
        distinct = list(dict.fromkeys(values))
        return (distinct * layers)[:layers]
    if "heads" in key:
        return [_HEADS] * layers
    return [min(value, 2 * _HIDDEN) if isinstance(value, int) and value > WIDTH else value for value in values[:layers]]


LENGTHS = (13, 40, 11)
"""Tokens of the documents of a row."""


def recipe_of(model_type: str, **sections: Any) -> dict[str, Any]:
    """Two steps of a tiny network on built-in stories."""
    return {
        "model": {"config": small(model_type), **sections.pop("model", {})},
        "tokenizer": {"vocab_size": VOCABULARY},
        "data": {"train": [{"sample": 200}], "sequence_length": WIDTH, "packing": "documents"}
        | sections.pop("data", {}),
        "batch": {"global_size": 4, "micro_size": 1},
        "length": {"steps": 2},
        "optim": {"name": "AdamW", "lr": 1e-3, "args": {"eps": 1e-6}},
        "precision": "fp32",
        "output": {"dir": str(RESULTS / "run"), "overwrite": True, "save_model": False},
        **sections,
    }


def batch() -> dict[str, Any]:
    """Two rows of documents, the second with them in another order."""
    import torch

    # Not among the tokens that have a meaning to a network.
    ids = torch.randint(100, VOCABULARY, (2, WIDTH), generator=torch.Generator().manual_seed(0))
    rows = (LENGTHS, LENGTHS[::-1])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    edges = torch.tensor([0, *(n for row in rows for n in row)]).cumsum(0).to(torch.int32)
    return {"input_ids": ids, "targets": ids.roll(-1, 1), "position_ids": positions, "cu_seqlens": edges}


def network_of(model_type: str, **model: Any) -> Any:
    """The network that a recipe trains, without what is random, and with weights that are felt."""
    import torch

    from finetune.config.recipe import validate_recipe
    from finetune.models.build_network import build_model
    from finetune.models.heads import NEXT_TOKEN
    from finetune.models.model_config import resolve_model_config

    recipe = validate_recipe(recipe_of(model_type, model=model))
    network: Any = build_model(recipe, resolve_model_config(recipe, vocab_size=VOCABULARY), NEXT_TOKEN).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(network.named_parameters()):
            if parameter.ndim > 1 and ("weight" in name or "proj" in name) and "conv" not in name:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return network


def apart(one: Any, two: Any) -> float:
    """The largest difference, as a share of the largest value."""
    return float((one - two).abs().max() / two.abs().max().clamp(min=1e-9))


def alone(network: Any, rows: dict[str, Any]) -> Any:
    """Scores of documents that are each a batch of their own, and of which the network is told nothing."""
    import torch

    starts = [row * WIDTH + start for row in range(2) for start in _starts(rows["position_ids"][row])]
    ids, ends = rows["input_ids"].flatten(), [*starts[1:], 2 * WIDTH]
    found = [network(input_ids=ids[a:b][None], use_cache=False).logits[0] for a, b in zip(starts, ends, strict=True)]
    return torch.cat(found).view(2, WIDTH, -1)


def _starts(positions: Any) -> list[int]:
    return [place for place, position in enumerate(positions.tolist()) if position == 0]


def examine(model_type: str) -> dict[str, Any]:
    """What a network's scores, loss and gradients are worth, in one process.

    Returns:
        What `auto` takes for attention and loss, and by how much the results are off; a text where there are none.
    """
    import torch

    from finetune.distributed.strategies import strategy
    from finetune.models import chunked_loss
    from finetune.tasks.causal_lm import CAUSAL_LM, causal_lm_logits

    network = network_of(model_type)
    found: dict[str, Any] = {
        "class": type(network).__name__,
        "attention": network.config._attn_implementation,
        "chunked": chunked_loss.loss_head(network) is not None,
    }
    rows = batch()
    whole = {key: rows[key] for key in ("input_ids", "targets")}
    own = network_of(model_type, attention="sdpa" if network._supports_sdpa else "eager", loss="plain")
    own.load_state_dict(network.state_dict())

    def learned(some: Any) -> tuple[Any, dict[str, Any]]:
        some.zero_grad()
        value = CAUSAL_LM.loss_sum(some, whole)
        value.backward()
        return value.detach(), {n: p.grad for n, p in some.named_parameters() if p.grad is not None}

    def gradients() -> float:
        (one, ours), (two, theirs) = learned(network), learned(own)
        largest = max(float(g.abs().max()) for g in theirs.values())
        return max(apart(one, two), *(float((ours[n] - g).abs().max()) / largest for n, g in theirs.items()))

    with torch.no_grad():
        plain = own(input_ids=rows["input_ids"], use_cache=False).logits
        found["finite"] = bool(plain.isfinite().all())
        found["wrapped"] = _measured(lambda: apart(causal_lm_logits(network, whole), plain))
        other = torch.cat([rows["input_ids"][:, :50], rows["input_ids"][:, 50:51].expand(-1, WIDTH - 50)], 1)
        found["ahead"] = apart(own(input_ids=other, use_cache=False).logits[:, :50], plain[:, :50])
        wanted = alone(own, rows)
        found["documents"] = _measured(lambda: apart(causal_lm_logits(network, rows), wanted))
        found["masks"] = _measured(lambda: apart(causal_lm_logits(own, rows), wanted))
    found["gradients"] = _measured(gradients)
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    used = [name for name, p in trained.items() if p.grad is not None]
    found["unused"] = strategy.unused_parts(trained, used) if isinstance(found["gradients"], float) else []
    return found


def _measured(measure: Any) -> float | str:
    try:
        return float(measure())
    except Exception as error:  # an architecture may stumble in any way over what it is told
        return _said(error)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if type(error).__module__.startswith("finetune") else f"{type(error).__name__}: {text[:300]}"


def steps(model_type: str, folder: Path) -> dict[str, Any]:
    """Two steps as a run takes them, with every proof of its start: first of packed documents, else of wrapped rows.

    Returns:
        `packing`, losses and gradient norms, what was refused on the way, and the kernels.
    """
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from finetune.config.recipe import validate_recipe
    from finetune.training import loop
    from finetune.training.build_run import build_run
    from finetune.utils.errors import FinetuneError

    found: dict[str, Any] = {"refused": []}
    for packing in ("documents", "wrapped"):
        try:
            tree = recipe_of(model_type, data={"packing": packing, "cache_dir": str(folder / "cache")})
            tree["output"]["dir"] = str(folder / f"{model_type}-{packing}")
            run = build_run(validate_recipe(tree), quiet=True)
            taken = [loop.train_step(run, step) for step in range(2)]
            totals = run.backend.all_reduce_sum(torch.stack([t.losses.double().sum() for t in taken]))
            found |= {
                "packing": packing,
                "loss": [x / t.sync.read()[0] for x, t in zip(totals.tolist(), taken, strict=True)],
                "norm": [t.norm.read()[0] for t in taken],
                "kernels": json.loads((run.directory.path / "run.json").read_text())["kernels"],
            }
            return found
        except FinetuneError as error:
            found["refused"].append(_said(error))
        except Exception as error:  # what the run should have refused
            found["refused"].append(f"a traceback: {_said(error)}")
        finally:
            run = None
            gc.collect()
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
    return found


def work(kind: str, types: list[str], folder: Path) -> None:
    """Goes through architectures, and writes down what it finds of each as soon as it is found."""
    import os

    import torch
    import transformers

    from finetune.utils.library_imports import silence_libraries

    silence_libraries()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    first = os.environ.get("RANK", "0") == "0"
    file, began = folder / f"{kind}.jsonl", time.monotonic()
    known = read(file)
    left = [name for name in types if name not in known]
    for number, name in enumerate(left, 1):
        if kind == "single":
            try:
                found = examine(name)
            except Exception as error:  # a row of the table as well
                found = {"failed": _said(error)}
            found["steps"] = steps(name, folder / kind)
        else:
            found = steps(name, folder / kind)
        if first:
            with file.open("a") as out:
                out.write(json.dumps({"model_type": name, **found}) + "\n")
            print(f"{kind} {number}/{len(left)}, {time.monotonic() - began:.0f} s: {name}", flush=True)
        gc.collect()


def read(file: Path) -> dict[str, dict[str, Any]]:
    """What was found so far, by architecture."""
    lines = file.read_text().splitlines() if file.exists() else []
    return {found.pop("model_type"): found for found in map(json.loads, lines)}


def types() -> list[str]:
    """All that transformers calls a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


GOOD = 1e-4
"""The most that fp32 results may be off, as a share of the largest."""


def verdict(single: dict[str, Any], fsdp: dict[str, Any]) -> tuple[str, str, str, str, str]:
    """`trains`, attention, documents, loss and a remark on an architecture."""
    taken = single["steps"]
    refused = taken["refused"]
    if "packing" not in taken:
        return "no", "", "", "", refused[-1]
    kernels, documents = taken["kernels"], taken["packing"] == "documents"
    remarks = [f"**not compared: {single['failed']}**"] if "failed" in single else []
    off = {key: single.get(key, 0.0) for key in ("ahead", "wrapped", *(["documents"] if documents else []))}
    if kernels["loss"] == "chunked":
        off["gradients"] = single.get("gradients", 0.0)
    for key, value in off.items():
        if not (isinstance(value, float) and value <= GOOD):
            remarks.append(f"**{key} off: {value}**")
    if not documents:
        remarks.append("wrapped or padded rows only: " + reason(refused[0]))
    if unused := single.get("unused"):
        remarks.append("not used: " + ", ".join(f"`{name}`" for name in unused))
    if "packing" not in fsdp:
        remarks.append("not under FSDP2: " + "; ".join(fsdp.get("refused", ["not tried"])))
    else:
        worst = max(
            abs(a - b) / max(abs(a), 1e-9)
            for key in ("loss", "norm")
            for a, b in zip(taken[key], fsdp[key], strict=True)
        )
        if worst > GOOD or fsdp["packing"] != taken["packing"]:
            remarks.append(f"**FSDP2 takes another path: {worst:.0e}**")
    return (
        "yes",
        kernels["attention"],
        "yes" if documents else "no",
        kernels["loss"],
        "; ".join(remarks),
    )


def reason(refusal: str) -> str:
    """Why documents are not packed, in a few words."""
    if "see each other" in refusal:
        return "documents of a row would see each other"
    if "computed as it is alone" in refusal:
        return "positions do not restart"
    return refusal


def table(single: dict[str, dict[str, Any]], fsdp: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The rows of the page."""
    yield "| `model_type` | trains | attention | documents packed | loss | remarks |"
    yield "|---|---|---|---|---|---|"
    for name in sorted(single):
        trains, *rest, remark = verdict(single[name], fsdp.get(name, {}))
        yield f"| `{name}` | {trains} | {' | '.join(rest)} | {remark.replace('|', '/')} |"


HEAD = """# Architectures

Look up whether a causal language model trains and packs. Every one of transformers {version} was tried in a tiny size
with random weights: {good} of {all} train. `python scripts/architectures.py` wrote this page.

- **trains**: two steps in fp32, in one process and under FSDP2 in two, with all checks of a run's start. Losses and
  gradient norms of the two agree within 1e-4, unless a remark gives the difference.
- **attention**, **loss**: what `auto` selects for `model.attention` and `model.loss`.
- **documents packed**: with `data.packing: documents`, scores equal those of each document alone, by transformers' own
  attention and masks, within 1e-4 of the largest. If not, such a run is refused: use `wrapped` or `padded`.
- **not used**: parts without a gradient, such as an image encoder. Freeze them with `model.freeze`: DDP and ZeRO
  [refuse to train them](pretrained.md#parts-that-the-task-never-uses).
- Scores of full rows, and gradients of a chunked loss, equal those of transformers within 1e-4 of the largest.
- Rows are shorter here than what sparse attention keeps (`index_topk` of DeepSeek-V3.2, `keep_window_size` of Doge).

Every run checks its own network at its start, listed here or not: tokens do not see later ones, a packed document has
the scores that it has alone, and logits leave the network as they leave its head.

"""


def write() -> None:
    """Writes the page."""
    import transformers

    single, fsdp = read(RESULTS / "single.jsonl"), read(RESULTS / "fsdp.jsonl")
    lines = list(table(single, fsdp))
    good = sum(" | yes | " in line.partition(" | attention ")[0][:60] for line in lines[2:])
    DOCS.write_text(HEAD.format(version=transformers.__version__, good=good, all=len(single)) + "\n".join(lines) + "\n")
    print(f"{DOCS.relative_to(ROOT)}: {good} of {len(single)} train")


def launch(names: list[str]) -> None:
    """Two ranks of FSDP2 that go through all of them in one launch."""
    file = ROOT / "accelerate_configs" / "fsdp.yaml"
    words = ["launch", "--config_file", str(file), "--main_process_port", "0", str(Path(__file__)), "--worker", "fsdp"]
    subprocess.run([sys.executable, "-m", "accelerate.commands.accelerate_cli", *words, *names], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all without any")
    parser.add_argument("--again", action="store_true", help="forget what earlier calls have found")
    parser.add_argument("--worker", choices=("fsdp",), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    names = arguments.types or types()
    if arguments.worker:
        work(arguments.worker, names, RESULTS)
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for kind in ("single", "fsdp"):
        file = RESULTS / f"{kind}.jsonl"
        if arguments.again and file.exists():
            kept = {name: found for name, found in read(file).items() if name not in names}
            file.write_text("".join(json.dumps({"model_type": name, **found}) + "\n" for name, found in kept.items()))
    work("single", names, RESULTS)
    single = read(RESULTS / "single.jsonl")
    able = [name for name in names if single[name].get("steps", {}).get("packing")]
    left = [name for name in able if name not in read(RESULTS / "fsdp.jsonl")]
    if left:
        launch(left)
    if arguments.types:
        fsdp = read(RESULTS / "fsdp.jsonl")
        print("\n".join(table({name: single[name] for name in names}, fsdp)))
    else:
        write()


if __name__ == "__main__":
    main()

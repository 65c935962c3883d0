"""Recipes that several test files launch: tiny networks on built-in stories."""

from typing import Any

from testdata import CONVERSATIONS, MODEL, stories

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def base(**sections: Any) -> dict[str, Any]:
    """A tiny Llama from nothing on built-in stories; `sections` are merged in."""
    recipe: dict[str, Any] = {
        "model": {"config": {**LLAMA, "max_position_embeddings": 128}},
        "tokenizer": {"name": MODEL},
        "data": {
            "train": stories("train", limit=600),
            "validation": stories("validation", limit=16),
            "sequence_length": 128,
            "packing": "documents",
        },
        "batch": {"global_size": 8, "micro_size": 2},
        "length": {"steps": 30},
        # A larger eps than usual: with 1e-8 the first steps divide rounding noise by rounding noise.
        "optim": {"name": "AdamW", "lr": 2e-3, "args": {"eps": 1e-6}},
        "schedule": {"name": "cosine", "warmup_steps": 5},
        "log": {"every_steps": 1},
        "precision": "fp32",
        "seed": 7,
    }
    for name, values in sections.items():
        recipe[name] = {**recipe.get(name, {}), **values} if isinstance(values, dict) else values
    return recipe


# A large rate and no clipping: a wrong factor on the gradient, to which Adam is blind, shows at once.
SGD = {"name": "SGD", "lr": 0.5, "weight_decay": 0.0, "clip_norm": None}

_DATA = base()["data"]
_SHORT = {"length": {"steps": 6}, "eval": {"at_end": False}}


def keeping(every_steps: int) -> dict[str, Any]:
    """Checkpoints from which other runs resume."""
    return {"every_steps": every_steps, "every_minutes": None, "keep": 9}


# The same run under every launch file; each name is one thing that could part them.
PARITY = {
    "adamw": base(
        # Micro-batches other than the training ones: the figure must not depend on them.
        length={"steps": 14},
        eval={"every_steps": 7, "micro_size": 3},
        sample={"prompt": "Once", "max_new_tokens": 12, "every_steps": 7},
        checkpoint=keeping(7),
    ),
    "sgd": base(
        optim={**SGD, "args": {}},
        schedule={"name": "constant", "warmup_steps": 0},
        checkpoint=keeping(3),
        **_SHORT,
    ),
    "padded": base(data={**_DATA, "packing": "padded"}, **_SHORT),
    "wrapped": base(data={**_DATA, "packing": "wrapped", "last_batch": "drop"}, **_SHORT),
    # Slow where a CPU has no instructions for it.
    "bf16": base(precision="bf16", length={"steps": 8}),
}

# Shards of more than a MiB, which DeepSpeed puts on disk; it keeps those of the other runs in memory.
WIDE = base(
    model={
        "config": {
            **base()["model"]["config"],
            "hidden_size": 512,
            "intermediate_size": 2048,
            "num_hidden_layers": 1,
        }
    },
    batch={"global_size": 4, "micro_size": 2},
    length={"steps": 6},
    data={**_DATA, "sequence_length": 32},
    optim={"name": "AdamW", "lr": 2e-4, "args": {"eps": 1e-6}},
)

# The same global batch, cut in other ways.
SPLITS = {
    f"{packing}_micro_{size}": base(
        data={**_DATA, "packing": packing}, batch={"global_size": 8, "micro_size": size}, length={"steps": 6}
    )
    for packing in ("documents", "padded")
    for size in (1, 2, 4, 8)
}

_FEW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_FEWER_KV = {**_FEW, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
# With dropout, so that its random stream is compared as well.
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}
# Sides that neither two nor three or four processes divide, and a group of an odd number of elements.
UNEVEN = {
    "model_type": "llama",
    "hidden_size": 36,
    "intermediate_size": 75,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "attention_bias": True,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama_tied": {"model_type": "llama", **_FEWER_KV, "tie_word_embeddings": True},
    "gpt2": GPT2,
    "qwen3": {"model_type": "qwen3", **_FEWER_KV},
    "gemma3": {
        "model_type": "gemma3_text",
        **_FEWER_KV,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"model_type": "mixtral", **_FEWER_KV, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def own_network(name: str, **sections: Any) -> dict[str, Any]:
    """One of `own_networks`, which have their own rows."""
    return base(task={"name": "own_networks:classifier", "args": {"network": name}}, **{**sections, "data": {}})


def _architectures() -> dict[str, dict[str, Any]]:
    few = {"length": {"steps": 3}, "data": {**base()["data"], "sequence_length": 64}}
    jobs = {name: base(model={"config": config}, **few) for name, config in _CONFIGS.items()}
    jobs["llama_checkpointed"] = base(
        model={"config": _CONFIGS["llama_tied"] | {"attention_dropout": 0.1}, "gradient_checkpointing": True},
        **few,
    )
    jobs["bert"] = base(
        task={"name": "sequence_classification", "num_labels": 7},
        model={"config": {"model_type": "bert", **_FEW, "intermediate_size": 64}},
        data={
            "train": [{"sample": 200}],
            "validation": [],
            "validation_fraction": 0.1,
            "sequence_length": 64,
            "packing": "padded",
        },
        length={"steps": 3},
    )
    # Neither gradients nor state come out even over ranks.
    jobs["uneven"] = base(model={"config": UNEVEN}, optim={"name": "SGD", "lr": 0.1, "args": {"momentum": 0.9}}, **few)
    jobs["mlp"] = base(task={"name": "own_task:mlp", "args": {"dropout": 0.1}}, **{**few, "data": {}})
    jobs["mlp_from_meta"] = base(task={"name": "own_task:mlp", "args": {"meta": True}}, **{**few, "data": {}})
    for name in ("encoder", "attention", "gpt", "vit", "odd", "few_rows"):
        # torch's attention has the biases of its keys, whose gradient is rounding, among others: Adam would step them.
        jobs[f"own_{name}"] = own_network(name, optim={**SGD, "lr": 0.05, "args": {}}, **few)
    return jobs


# The same three steps of every architecture.
ARCHITECTURES = _architectures()


# Runs whose rows or layers are split over ranks, which draw other dropout masks than one process does.
_BRIEF = {"length": {"steps": 4}, "eval": {"at_end": True}}
_FOUR_STEPS_OF_LORA: dict[str, Any] = {
    "model": {"name": MODEL, "config": None},
    "tokenizer": {},
    "lora": {"rank": 4},
    **_BRIEF,
}
_EITHER: dict[str, dict[str, Any]] = {
    **{name: ARCHITECTURES[name] for name in ("qwen3", "gemma3", "mixtral")},
    "checkpointed": {
        **ARCHITECTURES["llama_tied"],
        "model": {**ARCHITECTURES["llama_tied"]["model"], "gradient_checkpointing": True},
    },
    # 8 of 4 micro-batches, at a rate at which a wrong scale of the gradient shows.
    "accumulates": base(batch={"global_size": 8, "micro_size": 1}, optim={**SGD, "args": {}}, **_BRIEF),
    "lora": base(**_FOUR_STEPS_OF_LORA, checkpoint=keeping(2)),
    # So wide that each rank has whole blocks of those weights that share a scale.
    "qlora": base(
        model={"config": {**LLAMA, "hidden_size": 128, "intermediate_size": 256}, "quantization": "nf4"},
        lora={"rank": 4},
        precision="bf16",
        **_BRIEF,
    ),
}
SPLIT_ROWS = {
    **_EITHER,
    "gpt2": {
        **ARCHITECTURES["gpt2"],
        "model": {"config": {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}},
    },
}
SPLIT_LAYERS = {
    **_EITHER,
    # One tensor for queries, keys and values, and one for both halves of an MLP: outputs are gathered, inputs split.
    "phi3": base(model={"config": {"model_type": "phi3", **_FEWER_KV, "pad_token_id": 0}}, **_BRIEF),
    # Biases, of which some are added to a sum over ranks.
    "gpt_neox": base(
        model={"config": {"model_type": "gpt_neox", **_FEW, "intermediate_size": 64, "use_parallel_residual": False}},
        **_BRIEF,
    ),
    "biases": base(model={"config": {**LLAMA, "attention_bias": True, "mlp_bias": True}}, **_BRIEF),
}
SPLIT = {**SPLIT_ROWS, **SPLIT_LAYERS}
"""All of them, which one process runs to be compared with."""


def adapted(model: dict[str, Any], lora: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Adapters on lower-cased stories, which a model that knows stories does not know."""
    defaults = {
        "data": {
            "train": stories("train", limit=100),
            "validation": stories("validation", limit=2),
            "sequence_length": 64,
            "lowercase": True,
        },
        # `B` begins at zero, and with it the gradient of `A`: a small eps would divide noise by noise.
        "optim": {"name": "AdamW", "lr": 2e-3, "args": {"eps": 1e-5}},
        "length": {"steps": 3},
    }
    return {**base(lora=lora, **{**defaults, **sections}), "model": model}


def _shape(name: str) -> dict[str, Any]:
    return {"config": ARCHITECTURES[name]["model"]["config"]}


ADAPTERS_EVERYWHERE = {
    "plain": adapted(
        {"name": MODEL},
        {"rank": 8, "alpha": 16},
        sample={"prompt": "once", "max_new_tokens": 8},
    ),
    # One module that widens and one that narrows: `plain` and `nf4` show that every linear one takes adapters.
    "dora": adapted(
        {"name": MODEL, "gradient_checkpointing": True},
        {"rank": 4, "dora": True, "dropout": 0.2, "targets": ["q_proj", "down_proj"]},
        checkpoint=keeping(2),
    ),
    # Evaluated on the way: that must leave the quantized weights as they are.
    "nf4": adapted({"name": MODEL, "quantization": "nf4"}, {"rank": 8, "dropout": 0.1}, eval={"every_steps": 2}),
}
ADAPTERS = {
    **ADAPTERS_EVERYWHERE,
    "whole": adapted(
        {"config": UNEVEN, "gradient_checkpointing": True},
        {
            "rank": 3,
            "dropout": 0.2,
            "rslora": True,
            "targets": r".*\.q_proj|.*\.1\.mlp\..*",
            "save_modules": ["lm_head", "embed_tokens", "norm"],
        },
    ),
    "gpt2": adapted(_shape("gpt2"), {"rank": 4, "init": "pissa"}),
    "qwen3": adapted(_shape("qwen3"), {"rank": 4, "init": "orthogonal", "targets": ["q_proj", "mlp.up_proj"]}),
    # One row cannot be cut in two.
    "gemma3": adapted(_shape("gemma3"), {"rank": 1, "alpha": 1, "init": "gaussian"}),
    "bert": {**ARCHITECTURES["bert"], "lora": {"rank": 4}},
    "bf16": adapted({"name": MODEL}, {"rank": 4, "targets": ["q_proj", "up_proj"]}, precision="bf16"),
    "nf4_bf16": adapted({"name": MODEL, "quantization": "nf4"}, {"rank": 4}, precision="bf16", eval={"every_steps": 2}),
    "fp4": adapted(
        {**base()["model"], "quantization": "fp4", "double_quantization": False, "gradient_checkpointing": True},
        {"rank": 4, "save_modules": ["lm_head"]},
    ),
}

# Conversations, whose rows have more that is not learned than text has.
TALK = {
    "data": {
        "train": [
            {"path": str(CONVERSATIONS / "questions.jsonl"), "limit": 24},
            {"path": str(CONVERSATIONS / "sharegpt.json"), "limit": 24},
        ],
        "validation": [{"path": str(CONVERSATIONS / "sharegpt.json"), "limit": 4}],
        "sequence_length": 256,
    },
    "chat": {"template": "plain", "too_long": "cut_right"},
    "length": {"steps": 4},
    "eval": {"every_steps": 2},
    "sample": {"prompt": "Who are you?", "max_new_tokens": 8, "temperature": 0.0},
}
TALKS = {
    "chat": adapted({"name": MODEL}, {"rank": 8, "dropout": 0.05}, **TALK),
    "chat_nf4": adapted(
        {"name": MODEL, "quantization": "nf4", "gradient_checkpointing": True}, {"rank": 8, "dropout": 0.05}, **TALK
    ),
}

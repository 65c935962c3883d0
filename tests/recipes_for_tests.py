"""Recipes that several test files launch: tiny networks on real stories."""

from typing import Any

from harness import SHARED

MODEL = str(SHARED / "stories260K")


def stories(split: str, **more: Any) -> list[dict[str, Any]]:
    return [{"path": str(SHARED / "tinystories" / f"{split}.jsonl"), **more}]


def base(**sections: Any) -> dict[str, Any]:
    """A tiny Llama from nothing on real TinyStories, with a real tokenizer; `sections` are merged in."""
    recipe: dict[str, Any] = {
        "model": {
            "config": {
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "max_position_embeddings": 128,
            }
        },
        "tokenizer": {"name": MODEL},
        "data": {
            "train": stories("train", limit=600),
            "validation": stories("validation", limit=40),
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

PARITY = {
    "adamw": base(),
    "sgd": base(optim={**SGD, "args": {}}, schedule={"name": "constant", "warmup_steps": 0}, length={"steps": 12}),
    "padded": base(data={**base()["data"], "packing": "padded"}, length={"steps": 12}),
    "wrapped": base(data={**base()["data"], "packing": "wrapped"}, length={"steps": 6}),
    "bf16": base(precision="bf16"),
}

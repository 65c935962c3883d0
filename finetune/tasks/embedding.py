"""Embeddings of texts, learned by a contrastive loss over the global batch. Letters as in `task`, and `D` dimensions.

A record is an anchor, its positive and maybe a negative. Each anchor is to be nearer to its own positive than to all
other positives and negatives of the global batch, whatever ranks and micro-batches compute: the embeddings of all rows
are computed without gradients first, and each micro-batch puts its own in their places.

Source of the loss: sentence-transformers 6.2, `MultipleNegativesRankingLoss`; with `symmetric` its directions
`query_to_doc` and `doc_to_query`, `per_direction`. Source of the two passes: GradCache, arXiv:2101.06983.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig

from finetune.config.recipe_schema import EmbeddingSection, Recipe
from finetune.data.rows.kinds import embedded_texts
from finetune.models import lora_adapters
from finetune.models.heads import Head
from finetune.models.model_config import resolve_model_config
from finetune.tasks.build_task import transformers_task
from finetune.tasks.classification import network_inputs, set_padding
from finetune.tasks.task import Batch, Task, TaskData, Term
from finetune.utils.compat.transformers_private import model_mapping
from finetune.utils.errors import RecipeError

HEAD = Head("AutoModel", "FEATURE_EXTRACTION", "sentence-similarity", bare=True)

_MODES = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}
"""Names of poolings in the files of sentence-transformers."""
_NEAREST = (1, 5)
"""Of `embedded_texts.FIGURES`: among how many candidates the own positive is."""


def embedding(recipe: Recipe) -> Task:
    """The contrastive loss of normalised embeddings."""
    section = recipe.embedding or EmbeddingSection()

    def embed(network: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the embedding of each text, (texts, D) in fp32, of length 1."""
        hidden = network(**network_inputs(network, batch)).last_hidden_state
        pooling = _pooling(section, lora_adapters.config_of(network))
        return functional.normalize(pool(hidden.float(), batch["attention_mask"], pooling), dim=-1)

    def of_rows(network: nn.Module, batch: Batch) -> torch.Tensor:
        """Returns the embeddings of each row's texts, (B, texts, D)."""
        embeddings, count = embed(network, batch), len(batch["window_rows"])
        return embeddings.view(-1, count, embeddings.shape[1]).transpose(0, 1)

    def loss_sum(network: nn.Module, batch: Batch) -> torch.Tensor:
        own, rows = of_rows(network, batch), batch["window_rows"]
        whole = batch["window"].view(-1, *own.shape[1:]).index_copy(0, rows, own)
        with torch.autocast(whole.device.type, enabled=False):
            losses, ranks = contrast(whole, section.scale, symmetric=section.symmetric)
        total, here = losses.sum(), losses.detach()[rows].sum()
        # The gradient of the own embeddings is that of the losses of all rows, of which the own ones are the value.
        loss = total - total.detach() + here
        return torch.stack([loss, *((ranks[rows] < nearest).sum().float() for nearest in _NEAREST)])

    figures = (Term(name, weight=0.0) for name in embedded_texts.FIGURES)
    return transformers_task(
        HEAD,
        _build_config,
        embedded_texts.KIND,
        loss_sum=loss_sum,
        terms=(Term("loss"), *figures),
        window=lambda network, batch: of_rows(network, batch).flatten(1),
        scores=embed,
        files=sentence_transformers_files,
    )


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Returns a vector for each text, (B, D), of the hidden states of its tokens, (B, L, D), by the attention mask."""
    if pooling == "mean":
        weights = mask[..., None].to(hidden.dtype)
        return (hidden * weights).sum(1) / weights.sum(1)
    places = torch.zeros_like(mask[:, 0]) if pooling == "cls" else mask.sum(1) - 1
    return hidden[torch.arange(len(hidden), device=hidden.device), places]


def contrast(embeddings: torch.Tensor, scale: float, *, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss of each row, and how many candidates are nearer to its anchor than its own positive: (G,) each.

    The embeddings are those of anchors, positives and maybe negatives, (G, texts, D), of length 1. `symmetric` takes
    the mean with the loss of each positive against all anchors.
    """
    anchors, *candidates = embeddings.unbind(1)
    scores = scale * anchors @ torch.cat(candidates).T
    targets = torch.arange(len(anchors), device=scores.device)
    losses = functional.cross_entropy(scores, targets, reduction="none")
    if symmetric:
        losses = (losses + functional.cross_entropy(scores[:, : len(anchors)].T, targets, reduction="none")) / 2
    return losses, (scores > scores.diagonal()[:, None]).sum(1)


def _pooling(section: EmbeddingSection, config: PretrainedConfig) -> str:
    return section.pooling or ("last" if _is_decoder(config) else "mean")


def _is_decoder(config: PretrainedConfig) -> bool:
    """True of networks whose first tokens see no others: of those that write text, all but masked language models."""
    masked, causal = (type(config) in model_mapping(auto) for auto in (AutoModelForMaskedLM, AutoModelForCausalLM))
    return causal and not masked and not getattr(config, "use_bidirectional_attention", False)


def _build_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    tokenizer = ready.tokenizer if ready else None
    config = resolve_model_config(recipe, HEAD, tokenizer=tokenizer, vocab_size=recipe.tokenizer.vocab_size)
    if getattr(config, "is_encoder_decoder", False):
        raise RecipeError(
            f"model: a {config.model_type} is an encoder and a decoder, which give no embedding of one text. Name an "
            "encoder, or a decoder such as a language model."
        )
    if _is_decoder(config) and recipe.embedding is not None and recipe.embedding.pooling == "cls":
        raise RecipeError(
            f"embedding.pooling: `cls` is the first token, which sees no other in a {config.model_type}. Set it to "
            "`last` or `mean`."
        )
    if tokenizer is not None:
        set_padding(config, tokenizer)
    return config


def sentence_transformers_files(recipe: Recipe, config: Any) -> Mapping[str, bytes]:
    """Returns the files by which sentence-transformers opens a network with its pooling, by name.

    The keys are those that its versions from 2 on read. Source: sentence-transformers 6.2, `Pooling.load_config`.
    """
    pooling, data = _pooling(recipe.embedding or EmbeddingSection(), config), recipe.data
    names = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (path, name) in enumerate(names.items())
    ]
    modes = {f"pooling_mode_{name}": mode == pooling for mode, name in _MODES.items()}
    contents: dict[str, Any] = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": data.sequence_length, "do_lower_case": data.lowercase},
        "config_sentence_transformers.json": {"similarity_fn_name": "cosine", "prompts": {}},
        "1_Pooling/config.json": {"word_embedding_dimension": config.get_text_config().hidden_size, **modes},
        "2_Normalize/config.json": {},
    }
    return {name: json.dumps(content, indent=2).encode() for name, content in contents.items()}

"""Sequence to sequence: a network reads a source by its encoder, and writes the target. Letters as in `task`.

The decoder is given the target shifted right by the network's own rule: T5 and Marian begin with padding, BART with the
end of text, mBART with a language code.
"""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from finetune.config.recipe_schema import Recipe
from finetune.data.rows.kinds import source_target
from finetune.data.tokenization.special_tokens import target_wrapping_of
from finetune.models import chunked_loss, lora_adapters, prompts
from finetune.models.heads import Head
from finetune.models.model_config import resolve_model_config
from finetune.tasks.build_task import transformers_task
from finetune.tasks.classification import set_padding
from finetune.tasks.metrics import HITS
from finetune.tasks.task import Batch, Evaluation, TaskData

NAME = "seq2seq_lm"
"""Its name in recipes."""

HEAD = Head("AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", "text2text-generation", encodes=True)


def _build_config(recipe: Recipe, ready: TaskData | None) -> PretrainedConfig:
    tokenizer = ready.tokenizer if ready else None
    config = resolve_model_config(recipe, HEAD, tokenizer=tokenizer, vocab_size=recipe.tokenizer.vocab_size)
    if tokenizer is None:
        # To count or trace it; the number changes no shape.
        config.decoder_start_token_id = getattr(config, "decoder_start_token_id", None) or 0
        return config
    set_padding(config, tokenizer)
    given, start = recipe.model.config, getattr(config, "decoder_start_token_id", None)
    # Defaults of an architecture are numbers in the vocabulary of its first model.
    if start is None or (given is not None and "decoder_start_token_id" not in given):
        # mBART's decoder begins with the last token of a target, and to others any will do.
        config.decoder_start_token_id = target_wrapping_of(tokenizer).behind[-1]
    if given is not None and "forced_eos_token_id" not in given and hasattr(config, "forced_eos_token_id"):
        config.forced_eos_token_id = tokenizer.eos_token_id
    return config


def network_inputs(network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Returns what a network reads of a batch."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    shift = getattr(lora_adapters.transformer(network), "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        # The network shifts them itself, and computes a loss that is not used (NLLB, Blenderbot).
        return {**inputs, "labels": batch["targets"]}
    return {**inputs, "decoder_input_ids": shift(labels=batch["targets"])}


def _target_scores(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Scores of each token of the targets, (B, M, V), in the dtype that the network computes in."""
    return network(**network_inputs(network, batch), use_cache=False).logits  # type: ignore[no-any-return]


def _loss_sum(network: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> torch.Tensor:
    scores = _target_scores(network, batch)
    return chunked_loss.plain_loss(scores, batch["targets"], label_smoothing=label_smoothing)


def _evaluate(network: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    scores, targets = _target_scores(network, batch), batch["targets"]
    # No target is -100, so that padding is no hit.
    hits = (scores.argmax(-1) == targets).sum()
    return torch.stack((chunked_loss.plain_loss(scores, targets), hits.float())), None


def _next_token_logits(network: nn.Module, batch: Batch, *, kept: dict[str, Any]) -> torch.Tensor:
    """Returns scores of the token behind what is written of a target, (1, V), in fp32.

    Args:
        kept: Empty at first; then the states of the encoder, and keys and values of the tokens before.
    """
    start = prompts.decoder_start(lora_adapters.transformer(network))
    ids = torch.cat((batch["input_ids"].new_full((1, 1), start), batch["written"]), 1)
    given = {"decoder_input_ids": ids[:, -1:] if "past_key_values" in kept else ids}
    outputs = network(**(kept or {"input_ids": batch["input_ids"]}), **given, use_cache=True)
    kept.setdefault("encoder_outputs", BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state))
    if outputs.past_key_values is not None:
        kept["past_key_values"] = outputs.past_key_values
    return outputs.logits[:, -1].float()  # type: ignore[no-any-return]


SEQ2SEQ_LM = transformers_task(
    HEAD,
    _build_config,
    source_target.KIND,
    loss_sum=_loss_sum,
    evaluation=Evaluation(_evaluate, (HITS,)),
    next_token=_next_token_logits,
)

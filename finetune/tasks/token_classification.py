"""Token classification: a class for each word, learned and told at its first token. Letters as in `task`."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from finetune.data.rows.kinds import tags
from finetune.models import lora_adapters
from finetune.models.heads import Head
from finetune.tasks.build_task import transformers_task
from finetune.tasks.classification import class_config, class_loss, class_loss_sum, class_scores
from finetune.tasks.metrics import class_figures
from finetune.tasks.tag_spans import TagScheme, count_spans
from finetune.tasks.task import Batch, Figures

HEAD = Head("AutoModelForTokenClassification", "TOKEN_CLS", "token-classification")


def _loss_and_counts(network: nn.Module, batch: Batch) -> torch.Tensor:
    """Returns the loss, the number of words tagged right, and what `count_spans` counts: (2 + 3 K,)."""
    scores, targets = class_scores(network, batch), batch["targets"]
    predicted = scores.argmax(-1)
    config = lora_adapters.config_of(network)
    scheme = TagScheme.of([str(config.id2label[number]) for number in range(config.num_labels)])
    sums = torch.stack((class_loss(scores, batch), (predicted == targets).sum().float()))
    return torch.cat((sums, count_spans(predicted, targets, scheme).flatten()))


def _figures(counts: Sequence[float], names: Sequence[str]) -> Figures:
    kinds = TagScheme.of(names).kinds
    by_kind = {kind: counts[3 * number : 3 * number + 3] for number, kind in enumerate(kinds)}
    whole = class_figures(*(sum(side) for side in zip(*by_kind.values(), strict=True)))
    figures = {name: whole[name] or 0.0 for name in ("precision", "recall", "f1")}
    return Figures(figures, {kind: class_figures(*totals) for kind, totals in by_kind.items()})


TOKEN_CLASSIFICATION = transformers_task(
    HEAD,
    partial(class_config, head=HEAD),
    tags.KIND,
    loss_sum=class_loss_sum,
    loss_and_correct=_loss_and_counts,
    figures_of_counts=_figures,
    scores=class_scores,
)

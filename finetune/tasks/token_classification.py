"""Token classification: a class for each word, learned and told at its first token. Letters as in `task`."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from finetune.config.recipe import TAG_FIGURES
from finetune.models import lora_adapters
from finetune.models.heads import Head
from finetune.tasks.build_task import build_task_data, transformers_task
from finetune.tasks.classification import class_config, class_loss, class_loss_sum, class_scores
from finetune.tasks.metrics import HITS, class_figures
from finetune.tasks.tag_spans import TagScheme, count_spans
from finetune.tasks.task import Batch, Evaluation, Figures

HEAD = Head("AutoModelForTokenClassification", "TOKEN_CLS", "token-classification")


def _evaluate(network: nn.Module, batch: Batch) -> tuple[torch.Tensor, None]:
    """Sums the loss, the words tagged right, and what `count_spans` counts."""
    scores, targets = class_scores(network, batch), batch["targets"]
    predicted = scores.argmax(-1)
    config = lora_adapters.config_of(network)
    scheme = TagScheme.of([str(config.id2label[number]) for number in range(config.num_labels)])
    sums = torch.stack((class_loss(scores, batch), (predicted == targets).sum().float()))
    return torch.cat((sums, count_spans(predicted, targets, scheme).flatten())), None


def _figures(counts: Sequence[float], _: torch.Tensor | None, names: Sequence[str]) -> Figures:
    kinds = TagScheme.of(names).kinds
    by_kind = {kind: counts[3 * number : 3 * number + 3] for number, kind in enumerate(kinds)}
    whole = class_figures(*(sum(side) for side in zip(*by_kind.values(), strict=True)))
    figures = {name: whole[name] or 0.0 for name in ("precision", "recall", "f1")}
    return Figures(figures, {kind: class_figures(*totals) for kind, totals in by_kind.items()})


TOKEN_CLASSIFICATION = transformers_task(
    HEAD,
    partial(class_config, head=HEAD),
    build_data=partial(build_task_data, classifier=HEAD, learned="tags"),
    loss_sum=class_loss_sum,
    evaluation=Evaluation(_evaluate, (HITS,), TAG_FIGURES[1:], _figures),
    scores=class_scores,
    labelled=True,
    tagged=True,
)

"""Loads networks as a backend holds them: the one that is trained, and a frozen one beside it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from finetune.config.recipe_schema import Recipe
from finetune.data.tokenization.tokenizer import load_tokenizer
from finetune.distributed.backend import Backend
from finetune.distributed.split_parameters import UNSPLIT, Splits
from finetune.distributed.strategies import sequence
from finetune.models import activation_checkpointing, frozen_weights, quantization, split_layers
from finetune.models.build_network import build_model, check_pretrained, init_weights, settle_parameters
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.pretrained_files import Weights
from finetune.tasks.task import Task, TaskData
from finetune.tasks.task_lookup import task_config
from finetune.training import preflight
from finetune.utils.errors import DataError, RecipeError


def load_network(
    backend: Backend, recipe: Recipe, task: Task, weights: Weights | None, build: Callable[[], nn.Module]
) -> nn.Module:
    """Returns what `build` builds with its weights, sharded as it loads where the launch says so.

    Every rank must call it. `weights` are the files of the pretrained model, which must hold finite numbers.
    """
    if weights is not None:
        # Each rank looks at its share of them, and all refuse alike what is not finite.
        index = weights.first_not_finite(backend.rank, backend.world_size)
        position = torch.tensor([-1.0 if index is None else index], dtype=torch.float64, device=backend.device)
        if (worst := int(backend.all_reduce_max(position).item())) >= 0:
            weights.refuse(worst)
    # Sharded as it loads only what stays as it is loaded; quantized weights are quantized whole.
    # The values of an encoder-decoder's embeddings say which of them are one.
    whole = task.head is None or task.head.may_be_new or task.head.encodes or recipe.model.quantization is not None
    with backend.loading(pretrained=recipe.model.name is not None and not whole):
        network = settle_parameters(init_weights(build(), recipe.seed))
        quantization.compute_in(network, backend.dtype)
        if backend.strategy.casts_weights(backend):
            frozen_weights.set_output_dtype(network, backend.dtype)
    return network


def wrap_network(
    backend: Backend, network: nn.Module, recipe: Recipe, task: Task, data: TaskData
) -> tuple[ForwardWrapper, Splits, float | None]:
    """Splits layers and rows of a network where the launch asks for it.

    Returns:
        What a backend prepares, how its layers are split, and where they are the loss of a row before that.
    """
    wrapper = ForwardWrapper(network)
    wrapper.autocast = backend.autocast
    if recipe.model.activation_offload:
        wrapper.keeping = partial(activation_checkpointing.offload_activations, backend.device)
    splits, whole_loss = UNSPLIT, None
    if (group := backend.mesh.group("tp")) is not None:
        whole_loss = preflight.loss_of_row(backend, wrapper, task, data, torch.device("cpu")).item()
        splits = split_layers.split(network, group)
    sequence.install(wrapper, backend.mesh.group("sp"))
    return wrapper, splits, whole_loss


@dataclass(frozen=True)
class FrozenNetwork:
    """A second network that a recipe names, which stays as it is: what is known of it before it is loaded."""

    key: str
    """The recipe's key that names it."""
    recipe: Recipe
    """The recipe by which it is read."""
    weights: Weights | None
    base: dict[str, Any] | None = None
    """The model by its digest; see `base_of`."""


def read_frozen(recipe: Recipe, task: Task, data: TaskData) -> FrozenNetwork | None:
    """Looks at the files of the second network that a recipe names; None if it names none.

    Raises:
        RecipeError: If they cannot be read, or its vocabulary is another than the data's.
    """
    for key, section in recipe.frozen_models.items():
        own = recipe.of_frozen(section)
        assert task.head is not None
        with _naming(key):
            vocabulary, known = load_tokenizer(own).get_vocab(), data.tokenizer.get_vocab()  # type: ignore[union-attr]
            if apart := vocabulary.items() ^ known.items():
                raise RecipeError(
                    f"{section.name} has another vocabulary than the data's tokenizer: {len({n for n, _ in apart}):,} "
                    f"tokens differ, such as {min(apart)[0]!r}. Name a model with the same tokenizer."
                )
            return FrozenNetwork(key, own, check_pretrained(own, task_config(own, data), task.head))
    return None


@contextmanager
def _naming(key: str) -> Iterator[None]:
    """Names the key of a second model in errors, which call it as they do the recipe's own model."""
    try:
        yield
    except (DataError, RecipeError) as error:
        raise RecipeError(f"{key}: {str(error).removeprefix('model.name: ')}") from error


def hold_frozen(backend: Backend, frozen: FrozenNetwork, task: Task, data: TaskData) -> nn.Module:
    """Returns a second network as the launch holds networks, loaded and verified; every rank must call it."""
    assert task.head is not None
    with _naming(frozen.key):
        build = partial(build_model, frozen.recipe, task_config(frozen.recipe, data), task.head, trained=False)
        network = load_network(backend, frozen.recipe, task, frozen.weights, build)
    wrapper, _, whole_loss = wrap_network(backend, network, frozen.recipe, task, data)
    held = backend.hold_frozen(wrapper)
    if whole_loss is not None:
        preflight.check_layers(backend, held, task, data, whole_loss)
    if task.rows.writes_text and not task.rows.reads_source:
        preflight.verify_kernels(backend, held, frozen.recipe)
    return held

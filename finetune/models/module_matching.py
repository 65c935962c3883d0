"""Modules of a network: those that names of a recipe match, its embeddings and head, and owners of parameters."""

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from finetune.config.recipe import hint
from finetune.utils.errors import RecipeError


def match_names(
    key: str, wanted: str | Sequence[str], names: Sequence[str], *, kind: str, of: str, also: str = ""
) -> list[str]:
    """Returns the full names that are meant, in the order of `names`.

    Args:
        key: The recipe's key, for messages; likewise `kind` (of the named things) and `of` (their owner).
        wanted: One regular expression, which is compared with whole names, or last parts of names.
        names: Full dotted names to choose from.
        also: A word that would be allowed as well.

    Raises:
        RecipeError: If nothing is meant by the expression, or by one of the parts.
    """
    words = sorted({name.rsplit(".", 1)[-1] for name in names if not name.rsplit(".", 1)[-1].isdecimal()})
    if isinstance(wanted, str):
        found = [name for name in names if re.fullmatch(wanted, name)]
        if not found:
            meant = hint(wanted, [also, *(f"[{word}]" for word in words)])
            raise RecipeError(
                f"{key}: the regular expression '{wanted}' matches none of the {len(names)} {kind}s of "
                f"{of}{meant or '.'} It is compared with whole names, such as {' and '.join(names[:2])}."
            )
        return found
    found = []
    for word in wanted:
        named = [name for name in names if f".{name}".endswith(f".{word}")]
        if not named:
            raise RecipeError(
                f"{key}: '{word}' is no {kind} of {of}{hint(word, words) or '.'} Its {kind}s are {', '.join(words)}."
            )
        found += named
    return sorted(set(found), key=names.index)


def embeddings_and_head(network: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """Returns the input embedding and the output head of one of transformers' networks, as far as it has them."""
    return network.get_input_embeddings(), network.get_output_embeddings()


def parameter_owners(network: nn.Module) -> dict[int, list[nn.Module]]:
    """Returns the modules that hold each parameter, by the parameter's id."""
    owners: dict[int, list[nn.Module]] = defaultdict(list)
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)].append(module)
    return owners

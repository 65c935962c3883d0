"""Names of the classes of a pretrained classifier."""

import re
from typing import Any

from transformers import PretrainedConfig

from finetune.config.recipe_schema import Recipe
from finetune.data.class_labels import KnownClasses
from finetune.models.build_network import check_pretrained
from finetune.models.heads import Head
from finetune.models.model_config import read_pretrained_config
from finetune.utils.compat.transformers_private import model_mapping
from finetune.utils.errors import RecipeError


def pretrained_classes(recipe: Recipe, head: Head) -> KnownClasses | None:
    """Returns the classes of the classifier that a recipe starts from; None if none are named.

    A trained head computes what it has learned, whatever its classes are called later: labels have to be its names or
    numbers. Names such as LABEL_0, which transformers makes up, say nothing.

    Raises:
        RecipeError: If there is no such model, its weights are not whole, or its names contradict each other.
    """
    section = recipe.model
    if section.name is None:
        names = _names(section.config or {}, "model.config")
        return KnownClasses(names, "model.config", resizable=False) if names and not _made_up(names) else None
    config = read_pretrained_config(section)
    # As the file has it: the object has made-up names for classes that have none there.
    written = PretrainedConfig.get_config_dict(section.name, revision=section.revision)[0]
    names = _names(written, f"{section.name}, config.json")
    if names:
        config.num_labels = len(names)
    trained = _has_head(recipe, config, head)
    if not names and trained:
        names = tuple(config.id2label[number] for number in range(config.num_labels))
    if not names or (_made_up(names) and not trained):
        return None
    origin = f"the trained head of {section.name}" if trained else f"the config.json of {section.name}"
    if not _made_up(names):
        return KnownClasses(names, origin, binding=trained, resizable=False)
    unfit = f"{origin} does not name its classes ({names[0]}, ...); it may have learned them in another order"
    return KnownClasses(names, origin, binding=False, resizable=False, unfit=unfit)


def _names(values: dict[str, Any], where: str) -> tuple[str, ...]:
    """Returns the names in order of their numbers; none if there are none, or not one for each number."""
    by_number = {str(number): str(name) for number, name in (values.get("id2label") or {}).items()}
    by_name = {str(number): str(name) for name, number in (values.get("label2id") or {}).items()}
    both = [_in_order(by_number), _in_order(by_name)]
    meant = [names for names in both if names and not _made_up(names)]
    if len(set(meant)) > 1:
        raise RecipeError(
            f"{where}: id2label and label2id contradict each other ({', '.join(meant[0])}; {', '.join(meant[1])})."
        )
    return next(iter([*meant, *both]))


def _in_order(names: dict[str, str]) -> tuple[str, ...]:
    ordered = tuple(names[str(number)] for number in range(len(names)) if str(number) in names)
    return ordered if len(set(ordered)) == len(names) else ()


def _made_up(names: tuple[str, ...]) -> bool:
    return all(re.fullmatch(rf"LABEL_\d+|{number}", name) for number, name in enumerate(names))


def _has_head(recipe: Recipe, config: PretrainedConfig, head: Head) -> bool:
    """True if the files hold the head; whatever else they lack is refused, as it is before a run."""
    if type(config) not in model_mapping(head.auto) and not hasattr(config, "auto_map"):
        return False  # refused when the network is built
    if getattr(config, "quantization_config", None) is not None:
        return any(head.auto_class.removeprefix("AutoModel") in name for name in config.architectures or [])
    weights = check_pretrained(recipe, config, head)
    return weights is not None and not weights.new

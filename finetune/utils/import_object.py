"""Imports an object named as `package.module:name`."""

import importlib
from typing import Any

from finetune.utils.errors import RecipeError


def import_object(path: str, key: str) -> Any:
    """The object at `package.module:name`.

    Raises:
        RecipeError: If it cannot be imported, naming the recipe's `key`.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise RecipeError(
            f"{key}: cannot import '{path}': {error}. It is read as package.module:object, from the working directory "
            "and the installed packages."
        ) from error
    return found

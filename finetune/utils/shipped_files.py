"""Files that ship with the package: launch files, the configs that they name, recipes, and the tested versions."""

import os
from functools import partial
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
LAUNCH_FILES = "accelerate_configs"
RECIPES = "recipes"


def shipped_path(name: str) -> Path:
    """Returns a file or folder that ships: inside the package if it is installed, beside it in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.exists() else _PACKAGE.parent / name


def shipped_names(folder: str) -> list[str]:
    """Returns the names of the YAML files in a shipped folder, sorted."""
    return sorted(path.stem for path in shipped_path(folder).glob("*.yaml"))


def launch_folder() -> Path:
    """Returns the folder of launch files: ./accelerate_configs if there is one, else the shipped one."""
    here = Path(LAUNCH_FILES)
    return here if here.is_dir() else shipped_path(LAUNCH_FILES)


def _find(folder: str, word: str) -> str:
    word = os.path.expanduser(word)
    # Whoever reads the file says that there is none.
    if Path(word).suffix or Path(word).name != word or Path(word).is_file():
        return word
    places = (Path(folder) / f"{word}.yaml", shipped_path(folder) / f"{word}.yaml")
    return next((str(file) for file in places if file.is_file()), word)


launch_file = partial(_find, LAUNCH_FILES)
"""Returns the path of a launch file: a word itself, or that name in ./accelerate_configs, or the shipped one."""
recipe_file = partial(_find, RECIPES)
"""Returns the path of a recipe: a word itself, or that name in ./recipes, or the shipped one."""


def shipped_word(folder: str, path: str) -> str:
    """Returns the word that names a shipped file on every machine; another path as it is."""
    return Path(path).stem if Path(path).parent == shipped_path(folder) else path

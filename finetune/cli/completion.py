"""Shell completion: finds words that complete the command line. argcomplete asks at each press of the tab key."""

import os
from argparse import Action, ArgumentParser
from pathlib import Path
from typing import Any

from finetune.utils.shipped_files import LAUNCH_FILES, RECIPES, shipped_names


class PathParser(ArgumentParser):
    """A parser whose arguments that are paths expand `~`: no shell does behind `=` or within quotes."""

    def add_argument(self, *words: Any, **options: Any) -> Action:
        """Adds an argument as argparse does."""
        action = super().add_argument(*words, **options)
        if action.dest in _PATHS and action.type is None:
            action.type = os.path.expanduser
        return action


def answer_shell(parser: ArgumentParser) -> None:
    """Answers a shell that asks what a word can become, and ends the process then."""
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        complete: Any = _complete_word
        argcomplete.autocomplete(parser, always_complete_options=False, default_completer=complete)


def _complete_word(prefix: str, action: Action, **_: Any) -> list[str]:
    """Returns what a word can become; argcomplete leaves out what does not begin with the prefix."""
    from argcomplete.completers import FilesCompleter

    match action.dest:
        case "config_file":
            return [*_names(LAUNCH_FILES), *FilesCompleter((".yaml", ".yml", ".json"))(prefix)]
        case "recipe":
            return [*_names(RECIPES), *FilesCompleter((".yaml", ".yml"))(prefix)]
        case "on" | "trace":
            before, comma, _last = prefix.rpartition(",")
            return [before + comma + name for name in _names(LAUNCH_FILES)]
        case "overrides" | "words":
            from finetune.config.recipe import RECIPE_FIELDS

            # A section takes no value of its own.
            sections = {key.rpartition(".")[0].removesuffix(".0") for key in RECIPE_FIELDS}
            return [f"{key}=" for key in RECIPE_FIELDS if key not in sections]
        case "run":
            return _runs(prefix)
    return list(FilesCompleter()(prefix))


def _names(folder: str) -> list[str]:
    """Returns the names of recipes or launch files: those in the working directory, and those that ship."""
    return sorted({*(path.stem for path in Path(folder).glob("*.yaml")), *shipped_names(folder)})


def _runs(prefix: str) -> list[str]:
    """Returns run directories, and the folders on the way to them."""
    folder = Path(prefix).parent if not prefix.endswith("/") else Path(prefix)
    below = folder.iterdir() if folder.is_dir() else ()
    subfolders = [path for path in below if path.is_dir() and not path.name.startswith(".")]
    return [str(path) + ("" if (path / "run.json").is_file() else "/") for path in subfolders]


# Arguments that are paths, or may be; recipes and launch files are found by name as well.
_PATHS = {"base", "configs", "data", "directory", "folder", "json", "links", "model", "output", "run", "to", "write"}

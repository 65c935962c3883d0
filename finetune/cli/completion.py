"""Shell completion: finds words that complete the command line. argcomplete asks at each press of the tab key."""

import os
from argparse import Action, ArgumentParser
from pathlib import Path
from typing import Any

from finetune.utils.shipped_files import LAUNCH_FILES, RECIPES, shipped_names

SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str) -> str:
    """Returns a script that a shell evaluates to complete `finetune`."""
    from argcomplete.shell_integration import shellcode

    return shellcode(["finetune"], shell=shell)


class CompletingParser(ArgumentParser):
    """A parser whose arguments complete, and expand `~`, by their names; the same in every verb."""

    def add_argument(self, *words: Any, **options: Any) -> Action:
        """Adds an argument as argparse does."""
        action = super().add_argument(*words, **options)
        if action.dest in _COMPLETERS:
            action.completer = _COMPLETERS[action.dest]  # type: ignore[attr-defined]
        if action.dest in _PATHS and action.type is None:
            # No shell expands `~` behind `=` or within quotes.
            action.type = os.path.expanduser
        return action


def answer(parser: ArgumentParser) -> None:
    """Answers the shell where it asks what a word can become, and ends the process then.

    Args:
        parser: Of the whole command line.
    """
    if "_ARGCOMPLETE" in os.environ:
        import argcomplete

        argcomplete.autocomplete(parser, always_complete_options=False)


def launch_files(prefix: str, **_: Any) -> list[str]:
    """Launch files by name or path."""
    return _named(LAUNCH_FILES, prefix) + _paths(prefix, (".yaml", ".yml", ".json"))


def several_launch_files(prefix: str, **_: Any) -> list[str]:
    """Launch files by name, with commas between them."""
    before, comma, last = prefix.rpartition(",")
    return [before + comma + name for name in _named(LAUNCH_FILES, last)]


def recipes(prefix: str, **_: Any) -> list[str]:
    """Recipes by name or path."""
    return _named(RECIPES, prefix) + _paths(prefix, (".yaml", ".yml"))


def overrides(prefix: str, **_: Any) -> list[str]:
    """A recipe's keys, each with the `=` that its value follows."""
    from finetune.config.recipe import fields

    keys = [key for key, _ in fields()]
    # A section takes no value of its own; the next key is its first one.
    values = (key for key, following in zip(keys, [*keys[1:], ""], strict=True) if not following.startswith(f"{key}."))
    return [f"{key}=" for key in values if key.startswith(prefix)]


def runs(prefix: str, **_: Any) -> list[str]:
    """Run directories, and the folders on the way to them."""
    folder = Path(prefix).parent if not prefix.endswith("/") else Path(prefix)
    below = folder.iterdir() if folder.is_dir() else ()
    found = [path for path in below if path.is_dir() and not path.name.startswith(".")]
    return [
        str(path) + ("" if (path / "run.json").is_file() else "/") for path in found if str(path).startswith(prefix)
    ]


def _named(folder: str, prefix: str) -> list[str]:
    here = [path.stem for path in Path(folder).glob("*.yaml")]
    return [name for name in sorted({*here, *shipped_names(folder)}) if name.startswith(prefix)]


def _paths(prefix: str, endings: tuple[str, ...]) -> list[str]:
    from argcomplete.completers import FilesCompleter

    return [str(path) for path in FilesCompleter(endings)(prefix)]


# Arguments that are paths, or may be; recipes and launch files are found by name as well.
_PATHS = {"base", "configs", "data", "directory", "folder", "json", "links", "model", "run", "to", "write"}

_COMPLETERS = {
    "config_file": launch_files,
    "on": several_launch_files,
    "overrides": overrides,
    "recipe": recipes,
    "run": runs,
    "trace": several_launch_files,
    "words": overrides,
}

"""Checks of the files that a recipe names on this machine, before anything slow is imported."""

import glob
import os
import stat
from pathlib import Path

from finetune.config import path_kinds
from finetune.config.recipe import hint
from finetune.config.recipe_schema import Recipe
from finetune.utils.errors import DataError, FinetuneError, RecipeError


def check_paths(recipe: Recipe) -> None:
    """Checks that the data files and model directories that a recipe names are there.

    Names on the hub are not looked up, and nothing is read. A custom task may mean something else by these keys,
    so nothing is checked for it.

    Raises:
        FinetuneError: With everything that is missing: `DataError` if that is data only.
    """
    if ":" in recipe.task.name:
        return
    problems: list[FinetuneError] = []
    wanted: path_kinds.Wanted
    for wanted, name in ("model", recipe.model.name), ("tokenizer", recipe.tokenizer.name):
        if name is None:
            continue
        folder = Path(name)
        # A name on the hub is `name` or `organisation/name`.
        is_path = name.startswith(("/", "./", "../")) or name in (".", "..") or name.rstrip("/").count("/") > 1
        if is_path and not folder.is_dir() and path_kinds.kind_of(folder) is None:
            what = "a file" if folder.exists() else "not there"
            problem = (
                f"{wanted}.name is written as a path, {name}, and that is {what}{_nearest(folder)} (looked "
                f"from {Path.cwd()}). Name a directory, or a model on the hub as `name` or `organisation/name`."
            )
            problems.append(RecipeError(problem))
        elif (wrong := path_kinds.why_not(folder, wanted)) is not None:
            problems.append(RecipeError(f"{wanted}.name: {wrong}"))
    for source in (*recipe.data.train, *recipe.data.validation):
        if source.path is not None:
            try:
                find_files(source.path)
            except DataError as error:
                problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = DataError if all(isinstance(problem, DataError) for problem in problems) else RecipeError
        raise kind(" ".join(map(str, problems)))


def find_files(given: str) -> list[Path]:
    """Returns what a source's `path` names: a file, a directory, or the files that a glob matches, sorted by name.

    Links are followed. A file that a glob reaches by several names is taken once.

    Raises:
        DataError: If there is nothing, or something that is neither a file nor a directory.
    """
    # A name with brackets in it is first of all a name.
    names = [given] if os.path.lexists(given) else glob.glob(given, recursive=True)
    if not names:
        raise DataError(
            f"There is no file {given}{_nearest(Path(given))} (looked from {Path.cwd()}). Relative paths count from "
            "the working directory; correct the path, or the glob so that it matches."
        )
    # A link to a directory above itself has every file below it match many times: the shortest name stays.
    found: dict[str, Path] = {}
    for path in sorted(map(Path, names), key=lambda path: (len(path.parts), path)):
        found.setdefault(os.path.realpath(path), path)
    files = [path for path in sorted(found.values()) if not path.is_dir() or len(found) == 1]
    for path in files:
        _require_regular(path)
        if (wrong := path_kinds.why_not(path, "data")) is not None:
            raise DataError(wrong)
    return files


def _require_regular(path: Path) -> None:
    """Raises `DataError` unless a path leads to a file or a directory: a pipe blocks, and a device never ends."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        link = f"is a link to {os.readlink(path)}, which" if path.is_symlink() else "is there, but"
        raise DataError(
            f"{path} {link} cannot be opened: {error.strerror or error}. Check data.train and data.validation."
        ) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise DataError(
            f"{path} is a {kind}, and data is read from files, several times. Write it to a file and name that."
        )


def _nearest(path: Path) -> str:
    """Returns a hint at a similar name beside the path, or beside the first folder that is missing."""
    if glob.has_magic(str(path)):
        return ""
    while not path.parent.is_dir() and path.parent != path:
        path = path.parent
    try:
        return hint(path.name, os.listdir(path.parent))
    except OSError:
        return ""

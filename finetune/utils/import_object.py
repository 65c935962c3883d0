"""Objects that a recipe names: `package.module:name`, `file.py:name`, or objects that a caller handed over."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from modulefinder import ModuleFinder
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from finetune.utils.atomic_files import digest_of
from finetune.utils.errors import RecipeError

HANDED_OVER = "python:"
"""Prefix of names that are known in one process only."""

_objects: dict[str, Any] = {}

# Files and modules that are being imported.
_importing: list[str] = []


def import_object(path: str, key: str) -> Any:
    """Returns the object at `package.module:name` or `file.py:name`; a `RecipeError` names the recipe's `key`."""
    if path in _objects:
        return _objects[path]
    if path.startswith(HANDED_OVER):
        raise RecipeError(
            f"{key}: '{path}' stands for an object that a Python program handed over, and this process has none. "
            "Hand it over here too, or put it into a file and name it as file.py:object."
        )
    source, _, name = path.rpartition(":")
    advice, causes = "It is read as package.module:object or as file.py:object.", (AttributeError, OSError, ValueError)
    _importing.append(source)
    try:
        with RecipeError.explaining(f"{key}: cannot import '{path}'", advice, ImportError, *causes):
            if not source.endswith(".py") and (here := str(Path.cwd())) not in sys.path:
                sys.path.append(here)  # a command that is installed does not look there by itself
            return attrgetter(name)(_module_of(Path(source)) if source.endswith(".py") else _module_named(source))
    finally:
        _importing.pop()


def refuse_while_importing() -> None:
    """Raises a `RecipeError` if code starts a run that is imported for an object of a run that was started."""
    if _importing:
        raise RecipeError(
            f"{_importing[-1]} starts a run when it is imported, which each process of a launch and commands such as "
            'export do to find its functions. Put what starts the run below `if __name__ == "__main__":`.'
        )


def _is_running_script(file: str | Path | None) -> bool:
    """Tells if a file is the script that this process runs, which to import would run a second time."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    return script is not None and file is not None and Path(script).resolve() == Path(file).resolve()


def _module_named(name: str) -> ModuleType:
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is not None and _is_running_script(spec.origin):
        return sys.modules["__main__"]
    return importlib.import_module(name)


def _module_of(file: Path) -> ModuleType:
    """Returns the module in a file, loaded once; it can import those beside it."""
    if _is_running_script(file):
        return sys.modules["__main__"]
    name = f"{file.stem}_{digest_of(str(file.resolve()))[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        if (folder := str(file.resolve().parent)) not in sys.path:
            sys.path.append(folder)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def own_files(path: str) -> dict[str, Path]:
    """Returns the files of a user's own code that `package.module:name` or `file.py:name` leads to; imports nothing.

    They are its module, and those that this imports from the same folder, by their places in it. Libraries have none.
    """
    source = path.rpartition(":")[0]
    if source.endswith(".py"):
        name, folders = Path(source).stem, [Path(source).resolve().parent]
    else:
        name, folders = source, [Path.cwd(), *map(Path, sys.path)]
    top = name.partition(".")[0]
    folder = next((folder for folder in folders if (folder / top).is_dir() or (folder / f"{top}.py").is_file()), None)
    if folder is None or top in sys.stdlib_module_names or {"site-packages", "dist-packages"} & {*folder.parts}:
        return {}
    finder = ModuleFinder([str(folder)], excludes=["finetune"])
    with suppress(ImportError, SyntaxError):  # which are said where it is imported
        finder.import_hook(name)
    files = [Path(file) for module in finder.modules.values() if (file := vars(module)["__file__"]) is not None]
    return {str(file.relative_to(folder)): file for file in files}


def name_of(thing: Any) -> str | None:
    """Returns the name by which another process can import a function or class; None if it has none."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    try:
        if attrgetter(name)(sys.modules.get(module)) is not thing:
            return None
    except AttributeError:  # one of a function's own, such as a lambda
        return None
    if module != "__main__":
        return f"{module}:{name}"
    # A script; code that is typed into a notebook or a shell is in no file.
    file = getattr(sys.modules["__main__"], "__file__", None)
    return f"{file}:{name}" if file and file.endswith(".py") else None


@contextmanager
def handed_over(objects: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Makes `import_object` find objects inside, given by purpose, such as `loss`.

    Yields:
        The name of each: where it can, one that other processes find as well.
    """
    names = {purpose: name_of(thing) or f"{HANDED_OVER}{purpose}" for purpose, thing in objects.items()}
    before = dict(_objects)
    _objects.update({names[purpose]: thing for purpose, thing in objects.items()})
    try:
        yield names
    finally:
        _objects.clear()
        _objects.update(before)

"""The versions of libraries whose private names are used here, and the check that these names are still there."""

import inspect
from collections.abc import Iterator
from importlib import metadata
from types import CodeType, FunctionType
from typing import Any

from finetune.utils.errors import LibraryVersionError

TESTED = {
    "accelerate": "1.15",
    "bitsandbytes": "0.50",
    "datasets": "5.2",
    "deepspeed": "0.19",
    "peft": "0.21",
    "torch": "2.13",
    "transformers": "5.23",
}
"""The minor version of each library that the tests run with; `constraints.txt` has the full one."""


def require(library: str, owner: Any, *names: str) -> None:
    """Checks that a library still has the private names that are used of it.

    Args:
        library: As it is installed.
        owner: A module or class. Names that only its instances have are looked up in the code of its functions.
        *names: Attributes of `owner`, or of instances of it.

    Raises:
        LibraryVersionError: With the names that are missing.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        mentioned = set(_mentioned(owner))
        missing = [name for name in missing if name not in mentioned]
    if missing:
        place = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
        raise LibraryVersionError(
            f"{library} {metadata.version(library)} is installed, but this toolkit was tested with {library} "
            f"{TESTED[library]}, and uses private names of it that this version no longer has: "
            f"{', '.join(missing)} (of {place}). Install the tested version: pip install -c constraints.txt {library}"
        )


def _mentioned(owner: Any) -> Iterator[str]:
    """Attributes that a class's or module's functions read or write, and strings in them (of `getattr`)."""
    for holder in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        yield from getattr(holder, "__annotations__", ())
        for value in vars(holder).values():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, FunctionType):
                yield from _names_in(inspect.unwrap(function).__code__)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str):
            yield constant

"""Versions of libraries that the tests ran with, and checks of what is installed."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from types import CodeType, FunctionType
from typing import Any

from finetune.utils import platforms
from finetune.utils.errors import LibraryVersionError

PROVEN = {
    "accelerate": ("1.15", "1.15"),
    "bitsandbytes": ("0.50", "0.50"),
    "datasets": ("5.0", "5.2"),
    "deepspeed": ("0.19", "0.19"),
    "peft": ("0.19", "0.21"),
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.24"),
}
"""The lowest and highest minor version of each library that the tests ran with. See docs/versions.md."""

PYTHONS = ("3.11", "3.13")

NEEDED_BY = {"deepspeed": "ZeRO and offload to NVMe", "bitsandbytes": "model.quantization and 8-bit optimisers"}
"""Users of the libraries that a run may do without."""


def installed(library: str) -> str | None:
    """Returns the installed version of a library; None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def untested_versions() -> str:
    """Returns a line with the libraries, and the system, that the tests did not run with; "" if there are none."""
    system = platforms.untested_system()
    untested = [] if system is None else [f"{system} (tested: Linux)"]
    python = sys.version.split()[0]
    for library, version, (lowest, highest) in (
        ("Python", python, PYTHONS),
        *((library, installed(library), proven) for library, proven in PROVEN.items()),
    ):
        if version is not None and not minor(lowest) <= minor(version) <= minor(highest):
            untested.append(f"{library} {version} (tested: {' to '.join(dict.fromkeys((lowest, highest)))})")
    return f"Not tested with {', '.join(untested)}. `finetune doctor` says what was." if untested else ""


def minor(version: str | None) -> tuple[int, ...]:
    """Returns the first two numbers of a version; none of None."""
    return tuple(int(number) for number in re.findall(r"\d+", version or "")[:2])


def require_installed(library: str, user: str, extra: str | None = None) -> None:
    """Raises a `LibraryVersionError` if a library that not every run needs is missing, with what installs it.

    Args:
        user: User of the library, as the subject of a sentence.
        extra: The extra of this package that installs it.
    """
    if importlib.util.find_spec(library) is None:
        package = library if extra is None else f"'finetune[{extra}]'"
        raise LibraryVersionError(
            f"{user} needs {library}, which is not installed here. Install it: `pip install {package}`; or do without."
        )


def require(library: str, owner: Any, *names: str) -> None:
    """Raises a `LibraryVersionError` if a library lacks names that are used of it.

    Args:
        owner: A module or class. Names that only its instances have are looked up in the code of its functions.
        *names: Attributes of `owner`, or of instances of it.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        mentioned = set(_mentioned(owner))
        missing = [name for name in missing if name not in mentioned]
    if missing:
        owner_name = owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
        raise LibraryVersionError(
            f"{library} {installed(library)} is installed, but this toolkit was tested with {library} "
            f"{' to '.join(dict.fromkeys(PROVEN[library]))}, and uses names of it that this version does not have: "
            f"{', '.join(missing)} (of {owner_name}). Install a version that was tested: "
            f"pip install '{library}=={PROVEN[library][1]}.*'"
        )


def _mentioned(owner: Any) -> Iterator[str]:
    """Yields attributes that the functions of a class or module use, and strings in them (for `getattr`)."""
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

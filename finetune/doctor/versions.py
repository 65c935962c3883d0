"""Python and packages, against what the code needs and what its tests ran with."""

import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from finetune.doctor.finding import Asked, Finding, failure, ok, warning

# A checkout holds both; they are what `make setup` installs from.
ROOT = Path(__file__).resolve().parents[2]


def python(asked: Asked) -> Iterable[Finding]:
    """The interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    needs = SpecifierSet(_project()["requires-python"])
    if found in needs:
        yield ok("python", found)
    else:
        yield failure("python", f"{found}, needed is {needs}", "install such a Python and run `make setup` with it")


def packages(asked: Asked) -> Iterable[Finding]:
    """Every package that is needed."""
    pinned, sound = _tested(), 0
    for requirement in map(Requirement, _project()["dependencies"]):
        name, problem = requirement.name, None
        installed = _installed(name)
        tested = pinned.get(name.lower())
        if installed is None:
            problem = failure("packages", f"{name} is not installed", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(installed, prereleases=True):
            advice = f"pip install '{requirement}', or run `make setup`, which installs what was tested"
            problem = failure("packages", f"{name} {installed}, needed is {requirement.specifier}", advice)
        elif tested is not None and Version(installed).public != tested:
            advice = f"nothing, if it works; else pip install {name}=={tested}"
            problem = warning("packages", f"{name} {installed}; the tests ran with {tested}", advice)
        if problem is not None:
            yield problem
        sound += problem is None
    yield ok("packages", f"{sound} are as tested")


def _project() -> dict[str, Any]:
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def _tested() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip().lower(): version.strip() for name, _, version in pairs}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None

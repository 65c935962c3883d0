"""Python and its packages: versions, and whether bitsandbytes computes on this machine."""

import sys
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from finetune.diagnostics.doctor.finding import Asked, Finding, failure, ok, probe, warning
from finetune.distributed.device_selection import of_torch
from finetune.utils.shipped_files import shipped


def python(asked: Asked) -> Iterable[Finding]:
    """The interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    needs = SpecifierSet(metadata.metadata("finetune")["Requires-Python"])
    if found in needs:
        yield ok("python", found)
    else:
        yield failure("python", f"{found}, needed is {needs}", "install such a Python and run `make setup` with it")


def packages(asked: Asked) -> Iterable[Finding]:
    """Every package that is needed."""
    pinned, sound = _tested(), 0
    for requirement in map(Requirement, metadata.requires("finetune") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
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


def _tested() -> dict[str, str]:
    lines = shipped("constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip().lower(): version.strip() for name, _, version in pairs}


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


LIMIT_S = 120

SCRIPT = """
import sys, torch, bitsandbytes
device = sys.argv[1]
weight = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
packed, state = bitsandbytes.functional.quantize_4bit(weight, quant_type="nf4")
error = (bitsandbytes.functional.dequantize_4bit(packed, state) - weight).abs().max().item()
assert error < 0.2, f"quantized weights come back with an error of {error}"
print(bitsandbytes.__version__)
"""


def kernels(asked: Asked) -> Iterable[Finding]:
    """Packs and unpacks a matrix."""
    version, problem = probe(SCRIPT, "cuda" if of_torch().gpus else "cpu", env=asked.env, limit_s=LIMIT_S)
    advice = "install it anew (`make setup`), or do without model.quantization and 8-bit optimisers"
    if version:
        yield ok("bitsandbytes", f"{version} packs in 4 bits here")
    elif asked.recipe is not None and asked.recipe.model.quantization is not None:
        yield failure("bitsandbytes", f"it does not work, and the recipe needs it: {problem}", advice)
    else:
        yield warning("bitsandbytes", f"it does not work: {problem}", advice)

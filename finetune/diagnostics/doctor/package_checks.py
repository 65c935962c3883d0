"""Checks of Python and its packages: their versions, and that bitsandbytes computes on this machine."""

import sys
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from finetune.diagnostics.doctor.check_result import Asked, CheckResult, failure, ok, run_probe, warning
from finetune.distributed.device_selection import of_torch
from finetune.utils.compat.library_versions import NEEDED_BY, PROVEN, installed, untested_versions


def python(asked: Asked) -> Iterable[CheckResult]:
    """Checks the interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    needs = SpecifierSet(metadata.metadata("finetune")["Requires-Python"])
    if found in needs:
        yield ok("python", found)
    else:
        yield failure("python", f"{found}, needed is {needs}", "install such a Python and run `make setup` with it")


def packages(asked: Asked) -> Iterable[CheckResult]:
    """Checks that every package that is needed is there, in a version that the tests ran with."""
    sound, needed = 0, [asked.launch.library] if asked.launch else []
    if asked.recipe is not None and asked.recipe.model.quantization is not None:
        needed.append("bitsandbytes")
    for requirement in map(Requirement, metadata.requires("finetune") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, version, advice = requirement.name, installed(requirement.name), f"pip install '{requirement}'"
        if version is None and name in NEEDED_BY:
            result = failure if name in needed else warning
            found = f"{name} is not installed; {NEEDED_BY[name]} need it"
            yield result("packages", found, f"{advice}, or do without")
        elif version is None:
            yield failure("packages", f"{name} is not installed", advice)
        elif not requirement.specifier.contains(version, prereleases=True):
            advice += ", or run `make setup`, which installs what was tested"
            yield failure("packages", f"{name} {version}, needed is {requirement.specifier}", advice)
        else:
            sound += 1
    if text := untested_versions():
        yield warning("packages", text.partition(". ")[0], "nothing, if it works; else install versions that were")
    proven = (f"{name} {' to '.join(dict.fromkeys(minors))}" for name, minors in PROVEN.items())
    yield ok("packages", f"{sound} are there; tests ran with {', '.join(proven)}")


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


def kernels(asked: Asked) -> Iterable[CheckResult]:
    """Checks that bitsandbytes packs and unpacks a matrix."""
    version, problem = run_probe(SCRIPT, "cuda" if of_torch().gpus else "cpu", env=asked.env, limit_s=LIMIT_S)
    advice = "install it anew (`make setup`), or do without model.quantization and 8-bit optimisers"
    if version:
        yield ok("bitsandbytes", f"{version} packs in 4 bits here")
    elif asked.recipe is not None and asked.recipe.model.quantization is not None:
        yield failure("bitsandbytes", f"it does not work, and the recipe needs it: {problem}", advice)
    else:
        yield warning("bitsandbytes", f"it does not work: {problem}", advice)

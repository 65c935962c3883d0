"""Python and its packages: versions, and whether bitsandbytes computes on this machine."""

import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from finetune.diagnostics.doctor.check_result import Asked, CheckResult, failure, ok, probe, warning
from finetune.distributed.device_selection import of_torch
from finetune.utils.compat.library_versions import NEEDED_BY, PROVEN, installed, untested_versions


def python(asked: Asked) -> Iterable[CheckResult]:
    """The interpreter's version."""
    found = ".".join(map(str, sys.version_info[:3]))
    needs = SpecifierSet(metadata.metadata("finetune")["Requires-Python"])
    if found in needs:
        yield ok("python", found)
    else:
        yield failure("python", f"{found}, needed is {needs}", "install such a Python and run `make setup` with it")


def packages(asked: Asked) -> Iterable[CheckResult]:
    """Every package that is needed, and whether it is among the versions that the tests ran with."""
    sound = 0
    for requirement in map(Requirement, metadata.requires("finetune") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, problem, version = requirement.name, None, installed(requirement.name)
        if version is None and name in NEEDED_BY:
            needed = name in _needed(asked)
            said = (
                f"{name} is not installed; {NEEDED_BY[name]} need it",
                f"pip install '{requirement}', or do without",
            )
            problem = failure("packages", *said) if needed else warning("packages", *said)
        elif version is None:
            problem = failure("packages", f"{name} is not installed", f"pip install '{requirement}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            advice = f"pip install '{requirement}', or run `make setup`, which installs what was tested"
            problem = failure("packages", f"{name} {version}, needed is {requirement.specifier}", advice)
        if problem is not None:
            yield problem
        sound += problem is None
    if text := untested_versions():
        yield warning("packages", text.partition(". ")[0], "nothing, if it works; else install versions that were")
    proven = (f"{name} {' to '.join(dict.fromkeys(minors))}" for name, minors in PROVEN.items())
    yield ok("packages", f"{sound} are there; tests ran with {', '.join(proven)}")


def _needed(asked: Asked) -> Iterator[str]:
    """The libraries that this run needs and others do not."""
    if asked.launch is not None and asked.launch.library is not None:
        yield asked.launch.library
    if asked.recipe is not None and asked.recipe.model.quantization is not None:
        yield "bitsandbytes"


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
    """Packs and unpacks a matrix."""
    version, problem = probe(SCRIPT, "cuda" if of_torch().gpus else "cpu", env=asked.env, limit_s=LIMIT_S)
    advice = "install it anew (`make setup`), or do without model.quantization and 8-bit optimisers"
    if version:
        yield ok("bitsandbytes", f"{version} packs in 4 bits here")
    elif asked.recipe is not None and asked.recipe.model.quantization is not None:
        yield failure("bitsandbytes", f"it does not work, and the recipe needs it: {problem}", advice)
    else:
        yield warning("bitsandbytes", f"it does not work: {problem}", advice)

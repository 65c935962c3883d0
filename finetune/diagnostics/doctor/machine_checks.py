"""Checks of the machine and its packages, and of recipe, launch file and environment on it."""

import os
import resource
import shutil
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from finetune.config.provenance import flat
from finetune.diagnostics.doctor.check_result import Asked, CheckResult, failure, ok, run_probe, warning
from finetune.distributed.device_selection import slow_precision, visible_gpus
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.distributed.launch_settings import PREFIXES
from finetune.distributed.strategies.refusals import check_devices
from finetune.utils import platforms
from finetune.utils.compat.library_versions import NEEDED_BY, PROVEN, installed, untested_versions

# Open files. A process needs some hundred: libraries, sockets to every other, files of data.
FEW, PLENTY = 256, 4096
# Where a container's share of the processors is written: version 2 of cgroups.
QUOTA = Path("/sys/fs/cgroup/cpu.max")


def threads(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether processes and their threads fit the cores."""
    cores, allowed, setting = platforms.cores(), container_cores(), asked.env.get("OMP_NUM_THREADS")
    if setting is not None and not (setting.isdecimal() and int(setting)):
        yield failure("threads", f"OMP_NUM_THREADS is '{setting}'", "set it to a number, or unset it")
        return
    # With GPUs, processes keep to the one thread that Accelerate gives them.
    fair = 1 if visible_gpus() else max(1, cores // asked.local)
    each = int(setting) if setting else fair
    summary = f"{asked.local} process(es) x {each} thread(s) on {cores} core(s)"
    if allowed is not None and allowed < min(cores, asked.local * each):
        advice = f"set OMP_NUM_THREADS={max(1, int(allowed) // asked.local)}"
        yield warning("threads", f"{summary}, of which this container may use {allowed:.1f}", advice)
    elif asked.local > cores:
        yield warning("threads", f"{summary}: processes wait for each other", "start fewer, or take a larger machine")
    elif asked.local * each > cores:
        yield warning("threads", f"{summary}: they wait for each other", f"set OMP_NUM_THREADS={fair}")
    else:
        yield ok("threads", summary)


def container_cores() -> float | None:
    """Returns the processors that a container may use at a time; None if that is not limited."""
    try:
        most, period = QUOTA.read_text().split()
    except (OSError, ValueError):
        return None
    return None if most == "max" else int(most) / int(period)


def files(asked: Asked) -> Iterable[CheckResult]:
    """Checks how many files a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    summary, advice = f"{soft} open files a process", f"ulimit -n {max(PLENTY, soft)}"
    if hard != resource.RLIM_INFINITY and hard < PLENTY:
        advice += f" (the system allows {hard}: raise it in /etc/security/limits.conf)"
    if soft != resource.RLIM_INFINITY and soft < FEW:
        yield failure("files", summary, advice)
    elif soft != resource.RLIM_INFINITY and soft < PLENTY // 4:
        yield warning("files", summary, advice)
    else:
        yield ok("files", summary)


GIB = 2**30
# Checkpoints of a small model fit into the first; less than the second leaves nothing for logs and caches.
ROOMY, FULL = 10 * GIB, GIB // 4
SHARED = Path("/dev/shm")


def folders(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether there is room where a run writes."""
    recipe, home = asked.recipe, Path(asked.env.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    places = {
        "run directory": recipe.output.dir if recipe else "runs",
        "data cache": recipe.data.cache_dir if recipe else ".cache/finetune",
        "hub cache": asked.env.get("HF_HUB_CACHE", home / "hub"),
    }
    launched = flat(asked.launch.ds_config if asked.launch else {})
    places |= {key: value for key, value in launched.items() if key.endswith(".nvme_path")}
    for what, folder in ((what, Path(location)) for what, location in places.items()):
        # The folder, or the nearest one above it that is there.
        location = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.is_dir())
        free = shutil.disk_usage(location).free
        summary = f"{what}: {folder}, {free / GIB:.1f} GiB free"
        if not os.access(location, os.W_OK | os.X_OK):
            yield failure("disk", f"{what}: {folder}, which this user may not write", "name another folder")
        elif free < FULL:
            yield failure("disk", summary, "make room, or name a folder on another disk")
        elif free < ROOMY:
            yield warning("disk", summary, "a checkpoint of AdamW takes 12 bytes a trained parameter, and `keep` stay")
        else:
            yield ok("disk", summary)


def shared_memory(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether processes can share memory; a container has 64 MiB unless told otherwise."""
    from finetune.distributed.native_ops import shared_bytes

    advice = "give the container more: docker run --shm-size=8g (or --ipc=host)"
    if not SHARED.is_dir():
        yield failure("shared memory", f"there is no {SHARED}", f"mount a tmpfs there; {advice}")
        return
    free, needs = shutil.disk_usage(SHARED).free, shared_bytes(asked.launch, asked.local)
    summary = f"{free / GIB:.2f} GiB free"
    if free < needs:
        yield failure("shared memory", f"{summary}; this launch maps {needs / GIB:.2f} GiB", advice)
    elif free < GIB:
        yield warning("shared memory", f"{summary}; NCCL and workers that tokenise may need more", advice)
    else:
        yield ok("shared memory", summary)


# There where NVIDIA's kernel module is loaded.
DRIVER = Path("/proc/driver/nvidia/version")


def gpus(asked: Asked) -> Iterable[CheckResult]:
    """Checks whether torch sees the GPUs, and whether there is one for each process."""
    import torch

    count = visible_gpus()
    if count:
        yield ok("GPUs", f"{count} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    elif DRIVER.exists():
        yield warning(
            "GPUs",
            f"NVIDIA's driver is loaded, but torch {torch.__version__} sees no GPU",
            f"install a build of torch for GPUs (this one is for CUDA {torch.version.cuda}), and look at "
            f"CUDA_VISIBLE_DEVICES, which is {asked.env.get('CUDA_VISIBLE_DEVICES', 'not set')}",
        )
    else:
        yield ok("GPUs", f"none; processes compute on the CPU and talk by gloo (torch {torch.__version__})")
    if asked.foreseen is not None:
        check_devices(asked.foreseen.launch, count, asked.foreseen.env)


def dtypes(asked: Asked) -> Iterable[CheckResult]:
    """Checks a product in every dtype that a run may compute in."""
    gpu = visible_gpus() > 0
    names = ["float32", "bfloat16", *(["float16"] if gpu else [])]
    sound = [name for name in names if product_of_ones(name, "cuda" if gpu else "cpu") == 8.0]
    for name in sorted({*names} - {*sound}):
        yield failure("dtypes", f"a product in {name} fails or is wrong", "install torch anew: `make setup`")
    yield ok("dtypes", f"{', '.join(sound)}{'' if gpu else '; float16 needs a GPU'}")
    slow = slow_precision(asked.recipe.precision) if asked.recipe is not None else ""
    if slow:
        yield warning("dtypes", slow, "`precision: fp32`, or `auto`, which is fp32 here")


def product_of_ones(dtype: str, device: str) -> float:
    """Returns an element of a product of two 8 x 8 matrices of ones; nan if torch cannot compute it."""
    import torch

    try:
        ones = torch.ones(8, 8, dtype=getattr(torch, dtype), device=device)
        return float((ones @ ones)[0, 0])
    except RuntimeError:
        return float("nan")


def ops(asked: Asked) -> Iterable[CheckResult]:
    """Checks the native ops that the launch needs; without a launch file all that any could need."""
    from finetune.distributed import native_ops

    op_names, ready = native_ops.ops_to_inspect(asked.launch), []
    for op in op_names:
        spec = native_ops.OPS[op]
        if (lacking := native_ops.find_missing(op)) is not None:
            what, install = lacking
            needed = failure if asked.launch is not None else warning
            yield needed("native ops", f"{op}, for {spec.used_by}, cannot be compiled: {what}", install)
        elif native_ops.is_locked(op):
            advice = "wait if it is being built; else the next run, or `finetune ops`, removes it"
            yield warning("native ops", f"{op}: there is a build lock", advice)
        elif not native_ops.is_built(op):
            state = f"is not compiled yet: about {spec.build_s:.0f} s on 2 cores"
            advice = "run `finetune ops` ahead, or let the first run do it"
            yield warning("native ops", f"{op}, for {spec.used_by}, {state}", advice)
        else:
            ready.append(op)
    none = "none compiled" if op_names else "none needed"
    yield ok("native ops", f"compiled: {', '.join(ready)}" if ready else none)


def agreement(asked: Asked) -> Iterable[CheckResult]:
    """Checks that recipe and launch agree; a contradiction is raised, as a run raises it."""
    if asked.recipe is None:
        yield ok("agreement", "not looked at; name a recipe with --recipe")
        return
    from finetune.training.dry_run import check_run

    foreseen = asked.foreseen or predict_environment(None, {}, asked.env)
    settled = check_run(asked.recipe, foreseen.launch, foreseen.env)
    what = f"{foreseen.launch.kind} on {foreseen.launch.num_processes} process(es) in {settled.precision}"
    yield ok("agreement", f"{what}, {settled.accumulation} micro-batch(es) a step and process")


# They only say more.
TALK = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


def overriding(asked: Asked) -> Iterable[CheckResult]:
    """Checks for variables that act on a run beside launch file and recipe."""
    exported, beside = {}, "on every run"
    if asked.foreseen:
        # What the launcher exports takes the place of what was there.
        exported, beside = asked.foreseen.exported, "beside the launch file"
    acting = [n for n in sorted(asked.env) if n.startswith(tuple(PREFIXES)) and n not in (*TALK, *exported)]
    for name in acting:
        yield warning("variables", f"{name}={asked.env[name]} acts {beside}", f"unset {name}, unless it is meant")
    if not acting:
        yield ok("variables", "none overrides a file")


def python(asked: Asked) -> Iterable[CheckResult]:
    """Checks the interpreter's version."""
    version = ".".join(map(str, sys.version_info[:3]))
    needs = SpecifierSet(metadata.metadata("finetune")["Requires-Python"])
    if version in needs:
        yield ok("python", version)
    else:
        yield failure("python", f"{version}, needed is {needs}", "install such a Python and run `make setup` with it")


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
            message = f"{name} is not installed; {NEEDED_BY[name]} need it"
            yield result("packages", message, f"{advice}, or do without")
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


_PACK_IN_4_BITS = """
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
    version, problem = run_probe(_PACK_IN_4_BITS, "cuda" if visible_gpus() else "cpu", env=asked.env)
    advice = "install it anew (`make setup`), or do without model.quantization and 8-bit optimisers"
    if version:
        yield ok("bitsandbytes", f"{version} packs in 4 bits here")
    elif asked.recipe is not None and asked.recipe.model.quantization is not None:
        yield failure("bitsandbytes", f"it does not work, and the recipe needs it: {problem}", advice)
    else:
        yield warning("bitsandbytes", f"it does not work: {problem}", advice)

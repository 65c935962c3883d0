"""The plan: every launch file x every way to train."""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from finetune.config.recipe import divisors
from finetune.config.recipe_schema import Recipe
from finetune.data import prepared_cache
from finetune.distributed.device_selection import visible_gpus
from finetune.distributed.gpu_specs import Gpu, find_gpu, of_device
from finetune.distributed.launch.launch_config import Launch
from finetune.distributed.launch.launch_file import launch_files_in, read_launch_file
from finetune.distributed.launch.predicted_environment import launch_of_file
from finetune.distributed.link_speeds import LinkSpeeds
from finetune.planning import model_shapes, recommendations
from finetune.planning.activation_memory import Device, StepSetting
from finetune.planning.launch_candidates import Candidate, assess_candidate, setting_of
from finetune.planning.model_shapes import Variant
from finetune.planning.recommendations import Advice
from finetune.planning.step_time import Machines, Time, Work, count_work, predict_time
from finetune.tasks.task_lookup import find_task
from finetune.utils import atomic_files
from finetune.utils.errors import BackendError, FinetuneError, RecipeError
from finetune.utils.shipped_files import launch_folder

# Launch files that make sense on a single GPU.
_ON_ONE_GPU = ("single", "zero3_offload", "zero3_nvme")

# Where neither the command line nor this machine says.
_ASSUMED_GPU, _ASSUMED_GPUS = "h100-80gb", 8


@dataclass(frozen=True)
class Plan:
    """Everything that a plan says."""

    recipe: Recipe
    kind: str
    """The way that the recipe itself asks for."""
    machines: Machines
    variants: dict[str, Variant | str]
    launches: dict[str, Launch]
    unread: dict[str, str]
    """Launch files that cannot be read, or make no launch, and why."""
    candidates: dict[tuple[str, str], Candidate]
    """Keys are a launch file and a way."""
    advice: Advice
    time: Time | None
    """Time of the candidate that is recommended."""
    times: dict[tuple[str, str], Time]
    """Times of the candidates that fit, the cheapest first: those that take the least time."""
    rows: tuple[int | None, str]
    """As `count_rows` returns them."""
    work: Work
    first_size: int | None
    """Size with which trials of `batch.micro_size: auto` would begin under the launch that is recommended."""


def machines_of(parsed: argparse.Namespace, links: LinkSpeeds) -> Machines:
    """Reads machines off the command line. The rest is as on this one, or assumed where it has no GPU.

    Raises:
        RecipeError: If a figure makes no sense.
    """
    # The GPU has the memory that it says, whatever the table has.
    here: Gpu | None = None
    if there := visible_gpus():
        facts = torch.cuda.get_device_properties(0)
        memory = facts.total_memory / 2**30
        known = of_device(facts.name, memory)
        here = replace(known, memory_gib=memory) if known is not None else None
    gpus = parsed.gpus if parsed.gpus is not None else there or _ASSUMED_GPUS
    price, host = (0.0 if parsed.price is None else parsed.price), (1.0 if parsed.host is None else parsed.host)
    for name, value, sensible, allowed in (
        ("gpus", gpus, 1 <= gpus <= 100_000, "a number from 1 to 100000"),
        ("nodes", parsed.nodes, 1 <= parsed.nodes <= 100_000, "a number from 1 to 100000"),
        ("mfu", parsed.mfu, 0.0 < parsed.mfu <= 1.0, "a share of the peak above 0 and up to 1, such as 0.4"),
        ("network", parsed.network, 0.0 < parsed.network < math.inf, "10^9 bytes a second and GPU above 0, such as 50"),
        ("price", parsed.price, 0.0 <= price < math.inf, "what a GPU costs an hour, such as 2.5"),
        ("host", parsed.host, 0.0 < host < math.inf, "GiB of host memory of a machine above 0, such as 1000"),
    ):
        if not sensible:
            raise RecipeError(f"--{name} is {value}; give {allowed}.")
    gpu = find_gpu(parsed.gpu) if parsed.gpu is not None else here or find_gpu(_ASSUMED_GPU)
    guessed = {"--gpu": parsed.gpu is None and here is None, "--gpus": parsed.gpus is None and there == 0}
    assumed = None
    if any(guessed.values()):
        lacking = f"the table of GPUs lacks this machine's {torch.cuda.get_device_name()}" if there else ""
        why = lacking or "this machine has none"
        what = f"{gpus} x {gpu.name}" if guessed["--gpus"] else gpu.name
        flags = " and ".join(flag for flag, is_guessed in guessed.items() if is_guessed)
        assumed = f"Assumed: {what} a machine, since {why} and {flags} did not say. Give what you have or mean to rent."
    return Machines(gpu, gpus, parsed.nodes, parsed.network, parsed.mfu, parsed.price, parsed.host, links, assumed)


def count_rows(recipe: Recipe) -> tuple[int | None, str]:
    """Counts training rows for a length in epochs, prepared ones or an estimate; says how, or why there are none."""
    if recipe.length.epochs is None:
        return None, ""
    if ":" in recipe.task.name or any(source.hub is not None for source in recipe.data.train):
        return None, "those of custom tasks and of data on the hub are counted when they are prepared"
    try:
        with prepared_cache.nothing_built():
            train = find_task(recipe).build_data(recipe, True).train
    except prepared_cache.NotPreparedError as error:
        return error.rows, "estimated from the first documents of each source"
    except FinetuneError as error:
        return None, " ".join(str(error).split()).rstrip(".")
    return None if train is None else len(train), "as they are prepared"


def make_plan(
    recipe: Recipe,
    machines: Machines,
    folder: Path | None = None,
    stored: str | None = None,
    rows: tuple[int | None, str] = (None, ""),
) -> Plan:
    """Makes a plan; nothing is loaded or launched.

    Args:
        folder: Folder of launch files; None for those that ship.
        stored: The dtype that frozen weights are stored in; None reads it off them.
        rows: Training rows, as `count_rows` finds them.

    Raises:
        FinetuneError: If recipe or launch files cannot be planned.
    """
    if recipe.length.steps == 0:
        raise RecipeError("length.steps is 0: an evaluation trains nothing that could be planned. Give a length.")
    launches, unread = _launches(folder or launch_folder(), machines)
    variants = model_shapes.read_variants(recipe, stored)

    @functools.cache
    def of(name: str, kind: str, setting: StepSetting) -> Candidate:
        variant = variants[kind]
        if isinstance(variant, str):
            return Candidate(name, kind, launches[name], setting, "refused", reason=variant)
        candidate = assess_candidate(name, launches[name], variant, setting, machines.gpu)
        wanted = candidate.host * machines.gpus / 2**30
        if machines.host_gib is None or wanted <= machines.host_gib:
            return candidate
        reason = f"{wanted:,.0f} GiB of host memory a machine do not fit into {machines.host_gib:g}"
        return replace(candidate, verdict="no", reason="; ".join(filter(None, (candidate.reason, reason))))

    setting, kind = setting_of(recipe), model_shapes.kind_of(recipe)
    candidates = {(name, way): of(name, way, setting) for name in launches for way in model_shapes.KINDS}
    advice = recommendations.recommend_launch(recipe, kind, launches, of)
    chosen, planned, time, first_size = advice.candidate, variants[kind], None, None
    assert isinstance(planned, Variant)
    work = count_work(planned, rows[0])

    def time_of(candidate: Candidate) -> Time | None:
        variant = variants[candidate.kind]
        return predict_time(candidate, variant, machines, work.steps) if isinstance(variant, Variant) else None

    timed = {key: time_of(candidate) for key, candidate in candidates.items() if candidate.verdict == "fits"}
    times = {key: entry for key, entry in timed.items() if entry is not None}
    if chosen is not None:
        time = time_of(chosen)
        if recipe.batch.micro_size == "auto":
            sizes = divisors(recipe.batch.global_size // chosen.launch.data_ranks)
            settings = [replace(chosen.setting, micro=size) for size in sizes]
            first_size = max(s.micro for s in settings if of(chosen.name, chosen.kind, s).verdict == "fits")
    return Plan(
        recipe=recipe,
        kind=kind,
        machines=machines,
        variants=variants,
        launches=launches,
        unread=unread,
        candidates=candidates,
        advice=advice,
        time=time,
        times=dict(sorted(times.items(), key=lambda pair: pair[1].step_s)),
        rows=rows,
        work=work,
        first_size=first_size,
    )


def _launches(folder: Path, machines: Machines) -> tuple[dict[str, Launch], dict[str, str]]:
    """Returns the launches that make sense on these machines, what to take first at the front, and what fails, by name.

    The latter have the reason; if there are no others, it is raised.
    """
    files = launch_files_in(folder)
    for name in [name for name in files if name.endswith("_2nodes")]:
        written = files.pop(name)
        if machines.nodes > 1:
            files[name.removesuffix("_2nodes")] = written
    launches, unread = {}, {}
    for name, file in files.items():
        if name not in _ON_ONE_GPU if machines.ranks == 1 else name == "single":
            continue
        try:
            launch = _launch_on(file, machines)
        except BackendError as error:
            unread[name] = " ".join(str(error).split())
            continue
        if launch is not None:
            launches[name] = launch
    if not launches and unread:
        raise BackendError(" ".join(unread.values()))
    if not launches:
        raise RecipeError(
            f"No launch file in {folder} can run on {machines.ranks} GPU(s): one takes single.yaml or a ZeRO file with "
            "offload, more take files whose groups (dp_replicate_size, sp_size x tp_size) come out even. Name another "
            "folder by --configs, or another number by --gpus and --nodes."
        )
    preferred = sorted(launches.items(), key=lambda pair: recommendations.preference_of(pair[1], machines.nodes))
    return dict(preferred), unread


def _launch_on(file: Path, machines: Machines) -> Launch | None:
    """Returns the launch that a file makes on these machines; None if its groups do not come out even there."""
    sizes = read_launch_file(str(file)).parallelism_config
    copies = sizes.parallelism_config_dp_replicate_size
    if copies > 1:
        copies = machines.nodes if machines.nodes > 1 else copies
        if machines.ranks % copies or machines.ranks == copies:
            return None  # copies that do not come out even, or of nothing that is cut
    if machines.ranks % (sizes.parallelism_config_sp_size * sizes.parallelism_config_tp_size):
        return None
    launch = launch_of_file(file, machines.ranks, copies)
    # Layers are split within a machine.
    return None if machines.gpus % launch.tensor else launch


def write_launch_file(plan: Plan, file: Path) -> None:
    """Writes the launch file that a plan recommends.

    Raises:
        RecipeError: If it recommends none, or the file cannot be written.
    """
    if plan.advice.candidate is None:
        raise RecipeError(f"--write: there is no launch file to write, {plan.advice.reason}")
    if file.exists():
        raise RecipeError(f"--write: {file} is there already, and nothing is overwritten unasked. Name another file.")
    with RecipeError.explaining(f"--write: cannot write {file}", "", OSError):
        atomic_files.write_text(file, recommendations.launch_text(plan.advice.candidate.launch, plan.machines.nodes))


def candidates_of(recipe: Recipe, launch: Launch, room: int) -> Callable[[int], Candidate] | None:
    """Returns a function of the rows of a micro-batch, for ranks that have `room` bytes each.

    None if the network cannot be counted without its weights.
    """
    kind = model_shapes.kind_of(recipe)
    try:
        variant = model_shapes.read_variants(recipe, kinds=[kind])[kind]
    except RecipeError:
        return None
    assert not isinstance(variant, str)
    gpu = Gpu("this one", "", room / 2**30, 0.0, 0.0, 0.0)
    checkpointed = recipe.model.gradient_checkpointing is True
    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda rows: assess_candidate("", launch, variant, StepSetting(rows, checkpointed), gpu, device=device)


def largest_micro_size(recipe: Recipe, launch: Launch, sizes: Sequence[int], room: int) -> int:
    """Returns the largest of `sizes` of a micro-batch that fits into `room` bytes; the smallest if none is known to."""
    of = candidates_of(recipe, launch, room)
    fits = [size for size in sizes if of(size).verdict == "fits"] if of is not None else []
    return max(fits, default=min(sizes))

"""Facts that machines of a launch tell each other, compared before anything is built. Loads no torch, save for GPUs."""

import hashlib
import os
import platform
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from finetune.config.provenance import flat
from finetune.config.recipe_schema import NAMES_OF_CODE
from finetune.distributed.device_selection import visible_gpus
from finetune.distributed.launch.predicted_environment import PredictedEnvironment
from finetune.utils.compat.library_versions import PROVEN, installed, minor
from finetune.utils.import_object import own_files

CLOCK_S = 30.0
"""Seconds that clocks may be apart before it is said. Nothing that is computed depends on them."""

# Where each machine may say something else.
_OWN = ("machine_rank", "main_process_ip", "main_process_port", "deepspeed_config.deepspeed_config_file")
_OWN_IN_RECIPE = ("data.cache_dir",)

# What is compared, each with its title in messages and with advice.
_COMPARED = {
    "launch": (
        "Launch file and options",
        "Start with the same launch file and options on every machine; only machine_rank is its own.",
    ),
    "recipe": ("Recipe", "Start the same command, with the same recipe and values, on every machine."),
    "code": ("Files of finetune", "Install the same finetune on every machine."),
    "own_code": ("Code that the recipe names", "Copy the same files to every machine."),
    "versions": ("Versions", "Install the same versions on every machine: `make setup`, or one container image."),
    "devices": ("Devices", "Start on machines of one kind."),
}

_SHOWN = 6


@dataclass(frozen=True)
class MachineFacts:
    """Facts of one machine of a launch, as JSON has them."""

    rank: int
    host: str
    num_machines: int
    num_processes: int
    verb: str
    """Command that it runs: launch, comms or doctor."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Values of the recipe by dotted key, or the words of the command if it has no recipe."""
    launch: dict[str, Any] = field(default_factory=dict)
    """Values of the launch file, and of the DeepSpeed config that it names, by dotted key."""
    code: dict[str, str] = field(default_factory=dict)
    """Digest of each file of the package."""
    own_code: dict[str, str] = field(default_factory=dict)
    """Digest of each file of the user's own code that the recipe names."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of libraries."""
    devices: list[str] = field(default_factory=list)
    """Names of its GPUs."""
    address: str = ""
    """Address by which the others reach it."""
    interface: str = ""
    port: int = 0
    """Port at which it answers while links are tried."""
    problem: str = ""
    """Why it cannot take part, if it cannot."""

    @classmethod
    def of_here(cls, recipe: Mapping[str, Any], **facts: Any) -> Self:
        """Returns the facts of this machine that follow from a recipe and from what is installed, and those given."""
        return cls(
            host=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            recipe={key: value for key, value in flat(recipe).items() if key not in _OWN_IN_RECIPE},
            code=code_digests(),
            own_code=own_code_digests(recipe),
            versions=library_versions(),
            **facts,
        )

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """Returns facts that another machine has written; those that this version does not know are left out."""
        return cls(**{name: value for name, value in tree.items() if name in cls.__dataclass_fields__})

    @property
    def place(self) -> str:
        """The machine, for messages."""
        where = ", ".join(filter(None, (self.host, self.address)))
        return f"machine {self.rank} ({where})"


def launch_values(foreseen: PredictedEnvironment) -> dict[str, Any]:
    """Returns the values of a launch by dotted key, of those in which all machines must agree."""
    values = flat(foreseen.asked.model_dump(mode="json"))
    values |= flat(foreseen.launch.ds_config, "deepspeed.")
    return {key: value for key, value in values.items() if key not in (*_OWN, "num_machines", "num_processes")}


def code_digests() -> dict[str, str]:
    """Returns a digest of each file of this package, but for compiled ones."""
    root = Path(__file__).parents[2]
    files = [file for file in root.rglob("*") if file.suffix in (".py", ".json", ".yaml") and file.is_file()]
    return _digests({str(file.relative_to(root)): file for file in sorted(files)})


def own_code_digests(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Returns a digest of each file of the user's own code that a recipe names, such as a task."""
    values = flat(recipe)
    given = [values.get(key) or () for key in NAMES_OF_CODE]
    names = [name for value in given for name in ([value] if isinstance(value, str) else value) if ":" in name]
    return _digests({relative_path: file for name in names for relative_path, file in own_files(name).items()})


def _digests(files: Mapping[str, Path]) -> dict[str, str]:
    return {name: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for name, file in files.items()}


def library_versions() -> dict[str, str]:
    """Returns the versions of Python, and of the libraries that results depend on."""
    names = sorted({*PROVEN, "numpy", "safetensors", "tokenizers"})
    return {"Python": platform.python_version()} | {name: installed(name) or "not installed" for name in names}


def gpu_names() -> list[str]:
    """Returns the names of the GPUs that torch sees."""
    import torch

    return [torch.cuda.get_device_name(index) for index in range(visible_gpus())]


def find_differences(machines: Sequence[MachineFacts]) -> list[str]:
    """Returns sentences on what machines differ in, so that they must not start; none if they agree."""
    sentences, first = [], machines[0]
    for section, (title, advice) in _COMPARED.items():
        grouped: dict[str, list[int]] = defaultdict(list)
        for other in machines[1:]:
            for difference in _differences(section, first, other):
                grouped[difference].append(other.rank)
        if grouped:
            texts = [text.format(named_machines(ranks)) for text, ranks in grouped.items()]
            more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
            sentences.append(f"{title}: {'; '.join(texts[:_SHOWN])}{more}. {advice}")
    return sentences


def _differences(section: str, first: MachineFacts, other: MachineFacts) -> Iterator[str]:
    """Yields differences of a machine from the first; {} stands for the machines that differ so."""
    if section == "launch":
        for name in ("verb", "num_machines", "num_processes"):
            yield from _values(first, {name: getattr(first, name)}, {name: getattr(other, name)})
    if section == "devices":
        if bool(first.devices) != bool(other.devices):
            yield f"{_devices(other)} on {{}}, and {_devices(first)} on machine {first.rank}"
    elif section in ("code", "own_code"):
        files = sorted(
            name + (" (missing)" if theirs is None else " (only there)" if ours is None else "")
            for name, (ours, theirs) in unequal(getattr(first, section), getattr(other, section))
        )
        if files:
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            yield f"{_escaped(', '.join(files[:3]))}{more} on {{}} differ from those on machine {first.rank}"
    elif section == "versions":
        for name, (ours, theirs) in unequal(first.versions, other.versions):
            # A build of torch for another device computes, and connects, otherwise.
            if name == "torch" or minor(ours) != minor(theirs):
                yield f"{name} is {theirs} on {{}}, and {ours} on machine {first.rank}"
    else:
        yield from _values(first, getattr(first, section), getattr(other, section))


def _values(first: MachineFacts, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for key, (own, other) in unequal(ours, theirs):
        yield f"{_escaped(f'{key} is {_shown(other)}')} on {{}}, and {_escaped(_shown(own))} on machine {first.rank}"


def unequal(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yields keys that have another value in each of two mappings, with both values."""
    for key in dict.fromkeys((*ours, *theirs)):
        pair = ours.get(key), theirs.get(key)
        if pair[0] != pair[1]:
            yield key, pair


def _shown(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _devices(machine: MachineFacts) -> str:
    kinds = dict.fromkeys(machine.devices)
    return ", ".join(f"{machine.devices.count(kind)} x {kind}" for kind in kinds) or "no GPU"


def named_machines(ranks: Sequence[int]) -> str:
    """Returns `machine 1`, or `machines 1, 2 and 3`."""
    if len(ranks) == 1:
        return f"machine {ranks[0]}"
    texts = list(map(str, ranks))
    return f"machines {', '.join(texts[:-1])} and {texts[-1]}"


def find_warnings(machines: Sequence[MachineFacts], clocks_s: Mapping[int, float]) -> list[str]:
    """Returns sentences on differences with which a launch goes on; clocks are ahead of the first one's, by rank."""
    notices, first = [], machines[0]
    for other in machines[1:]:
        pairs = [
            f"{name} {theirs} ({ours})"
            for name, (ours, theirs) in unequal(first.versions, other.versions)
            if name != "torch" and minor(ours) == minor(theirs)
        ]
        if pairs:
            notices.append(f"{capital(other.place)} has {', '.join(pairs)}; in brackets what machine {first.rank} has.")
        if other.devices and first.devices and other.devices != first.devices:
            notices.append(
                f"{capital(other.place)} has {_devices(other)}, machine {first.rank} has {_devices(first)}: the "
                "slowest sets the pace."
            )
        if abs(apart := clocks_s.get(other.rank, 0.0)) > CLOCK_S:
            notices.append(
                f"The clock of {other.place} is {abs(apart):,.0f} s {'ahead of' if apart > 0 else 'behind'} "
                f"that of machine {first.rank}. Training does not depend on clocks; times in logs and metrics, and the "
                "ages that `finetune watch` and `finetune runs` show, do. Run an NTP client on every machine."
            )
    return notices


def capital(text: str) -> str:
    """Returns a text with a capital at its beginning."""
    return text[:1].upper() + text[1:]

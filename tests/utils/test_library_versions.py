"""Versions of libraries: what is allowed is what was tested, and what a run does not need may be missing."""

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from harness import ROOT, environment, run
from packaging.requirements import Requirement
from packaging.version import Version
from ranks import Place, by_finetune

from finetune.utils import platforms
from finetune.utils.compat import library_versions
from finetune.utils.errors import LibraryVersionError

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NEEDED = {requirement.name: requirement for requirement in map(Requirement, PROJECT["dependencies"])}
LOCKS = ROOT / "tests/versions"


def pins(file: Path) -> dict[str, Version]:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return {name.lower(): Version(version) for name, version in (line.split("==") for line in lines)}


def minor(version: Version) -> str:
    return f"{version.major}.{version.minor}"


def test_what_is_allowed_is_what_was_tested() -> None:
    lowest, highest = pins(LOCKS / "lowest.txt"), pins(LOCKS / "highest.txt")
    middle = pins(ROOT / "constraints.txt")
    for name, requirement in NEEDED.items():
        (bound,) = requirement.specifier
        assert bound.operator == ">=", f"{name}: what was not tried is not refused"
        assert lowest[name.lower()] == Version(bound.version), name
        assert lowest[name.lower()] <= middle[name.lower()] <= highest[name.lower()], name
    for name, proven in library_versions.PROVEN.items():
        assert proven == (minor(lowest[name]), minor(highest[name])), name


def test_the_lock_of_uv_has_the_pins_of_pip() -> None:
    packages = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    sources = {package["name"]: package["source"] for package in packages}
    assert sources.pop("finetune") == {"editable": "."}
    assert {source["registry"].split("/")[2] for source in sources.values()} == {"pypi.org"}, (
        "no registry but the public one"
    )
    locked = {package["name"]: Version(package["version"]) for package in packages}
    pinned = {re.sub(r"[-_.]+", "-", name): version for name, version in pins(ROOT / "constraints.txt").items()}
    # What builds an editable install is no dependency.
    assert {name: locked.get(name) for name in pinned if name != "editables"} == {
        name: version for name, version in pinned.items() if name != "editables"
    }


def test_the_interpreters_that_are_named() -> None:
    named = {word.rsplit(" ", 1)[1] for word in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", word)}
    assert named == {"3.11", "3.12", "3.13"}
    table = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    assert all(f"| {version} |" in table for version in named)


@pytest.mark.parametrize("library", ["deepspeed", "bitsandbytes", "ninja"])
def test_other_systems_do_without(library: str) -> None:
    marker = NEEDED[library].marker
    assert marker is not None
    assert marker.evaluate({"sys_platform": "linux"})
    assert not any(marker.evaluate({"sys_platform": system}) for system in ("darwin", "win32"))


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({}, ""),
        ({"torch": "2.11.0"}, ""),
        ({"torch": "2.14.7+cu130"}, ""),
        ({"torch": "2.99.0+cu130"}, "torch 2.99.0+cu130 (tested: 2.11 to 2.14)"),
        (
            {"torch": "2.10.1", "transformers": "6.0.0.dev0"},
            "torch 2.10.1 (tested: 2.11 to 2.14), transformers 6.0.0.dev0",
        ),
        ({"deepspeed": None}, ""),
        ({"deepspeed": "0.20.0"}, "deepspeed 0.20.0 (tested: 0.19)"),
    ],
)
def test_untested_versions_are_named(monkeypatch: pytest.MonkeyPatch, found: dict[str, str | None], says: str) -> None:
    def version(name: str) -> str:
        answer = found.get(name, f"{library_versions.PROVEN[name][1]}.0")
        if answer is None:
            raise metadata.PackageNotFoundError(name)
        return answer

    monkeypatch.setattr(metadata, "version", version)
    text = library_versions.untested_versions()
    assert says in text if says else text == ""
    assert "\n" not in text


# ---------------------------------------------------------------- without a library that not every run needs

# Python reads it in each process, whoever starts it.
CUSTOMISE = """
import sys
from importlib import metadata

WITHOUT = {without!r}
VERSIONS = {versions!r}
sys.modules.update(dict.fromkeys(WITHOUT))
truly = metadata.version

def version(name):
    if name in WITHOUT:
        raise metadata.PackageNotFoundError(name)
    return VERSIONS.get(name) or truly(name)

metadata.version = version
"""


def with_libraries(folder: Path, without: tuple[str, ...] = (), **versions: str) -> dict[str, str]:
    """An environment whose processes lack some libraries, and take others for other versions."""
    (folder / "sitecustomize.py").write_text(CUSTOMISE.format(without=without, versions=versions))
    return environment(PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))


def test_a_run_without_deepspeed_and_bitsandbytes(place: Place) -> None:
    env = with_libraries(place.folder, ("deepspeed", "bitsandbytes"))
    recipe = str(place.recipe(lora={"rank": 2}))
    code, output = run(by_finetune("fsdp", "--num_processes", "1", recipe), env=env)
    assert code == 0, output
    facts = json.loads((place.folder / "run/run.json").read_text())
    assert facts["versions"]["deepspeed"] is None
    for words in (["export", str(place.folder / "run"), "--as", "merged"], ["plan", recipe], ["doctor"]):
        done = subprocess.run(
            [sys.executable, "-m", "finetune", *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("launch", "sections", "says"),
    [
        (
            "zero2",
            {},
            "accelerate_configs/zero2.yaml asks for ZeRO, which needs deepspeed, which is not installed here",
        ),
        ("single", {"optim": {"name": "AdamW8bit"}}, "optim.name AdamW8bit needs bitsandbytes, which is not installed"),
        (
            "single",
            {"lora": {"rank": 2}, "model": {"quantization": "int8"}},
            "model.quantization int8 needs bitsandbytes, which is not installed",
        ),
    ],
)
def test_what_needs_a_library_that_is_missing(
    place: Place, launch: str, sections: dict[str, dict[str, object]], says: str
) -> None:
    env = with_libraries(place.folder, ("deepspeed", "bitsandbytes"))
    recipe = str(place.recipe(**sections))
    for more in ((), ("--dry-run",)):
        code, output = run(by_finetune(launch, recipe, *more), env=env)
        assert code == 2, output
        assert output.count(says) == 1, output
        assert "Traceback" not in output
    assert not place.files()


def test_an_untested_version_starts_with_one_line(place: Place) -> None:
    code, output = run(by_finetune("ddp", str(place.recipe())), env=with_libraries(place.folder, peft="0.99.0"))
    assert code == 0, output
    assert output.count("Not tested with peft 0.99.0 (tested: 0.19 to 0.21).") == 1


def test_need_says_what_to_install() -> None:
    library_versions.require_installed("torch", "All of it")
    with pytest.raises(
        LibraryVersionError, match=r"A test needs no_such_library, which .*`pip install no_such_library`"
    ):
        library_versions.require_installed("no_such_library", "A test")


# ---------------------------------------------------------------- on other systems

ON_WINDOWS = """
import sys
sys.platform = "win32"
sys.modules.update(dict.fromkeys(("fcntl", "grp", "pwd", "resource", "termios")))
"""
# What asks for the system as it is imported has been imported before.
ON_MACOS = """
import os, sys
import accelerate, bitsandbytes, datasets, deepspeed, peft, psutil, torch, transformers
sys.platform = "darwin"
del os.sched_getaffinity
from finetune.training.entry_point import train_main
sys.exit(train_main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "finetune", "--help"),
        ("-m", "finetune", "show", "sample"),
        ("-m", "finetune.training", "sample"),
        ("scripts/train.py", "recipes/sample.yaml"),
    ],
    ids=" ".join,
)
def test_windows_is_refused_in_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "sitecustomize.py").write_text(ON_WINDOWS)
    env = environment(PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]))
    done = subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"Error: {platforms.REFUSED}\n"
    assert done.stdout == ""
    done = subprocess.run(
        [sys.executable, "-c", "import finetune; finetune.train"], env=env, capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1] == f"finetune.utils.errors.FinetuneError: {platforms.REFUSED}"


def test_macos_says_that_nobody_has_tried(place: Place) -> None:
    code, output = run([sys.executable, "-c", ON_MACOS, str(place.recipe())])
    assert code == 0, output
    assert output.count("Not tested with macOS (tested: Linux).") == 1
    assert (place.folder / "run/model/model.safetensors").exists()


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_memory_is_counted_in_bytes(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    monkeypatch.setattr(platforms, "_SYSTEM", system)
    assert platforms.peak_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

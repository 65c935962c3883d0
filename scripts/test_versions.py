"""Runs the tests with other versions of the libraries, each set in an environment of its own below build/versions/.

    scripts/test_versions.py lowest highest     the smoke, tests/versions/smoke.py, as CI does
    scripts/test_versions.py lowest --quick     the quick tests
    scripts/test_versions.py tested --whole     the whole suite, with constraints.txt
    scripts/test_versions.py tested --python python3.13
    scripts/test_versions.py highest --lock     first write tests/versions/highest.txt anew

A set is `lowest` or `highest` (tests/versions/), `tested` (constraints.txt), or the path of a constraints file. For
each it prints a row of the table of docs/versions.md. The exit code is 1 if any test failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "tests" / "versions"
SHOWN = ("torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "bitsandbytes")
HEADER = """\
# The {name} versions that pyproject.toml allows, and what came with them. Written by
# `scripts/test_versions.py {name} --lock`; CI runs tests/versions/smoke.py with it.
"""
# What the smoke imports beside this package. The rest of what development needs takes as long to install.
SMOKE = "-e . hypothesis pytest pytest-timeout pytest-xdist"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="+", metavar="SET", help="lowest, highest, tested, or a constraints file")
    parser.add_argument("--python", default=sys.executable, help="the interpreter (this one)")
    more = parser.add_mutually_exclusive_group()
    more.add_argument("--quick", action="store_true", help="the quick tests, not the smoke")
    more.add_argument("--whole", action="store_true", help="the whole suite, not the smoke")
    parser.add_argument("--lock", action="store_true", help="first resolve lowest or highest anew")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parsed = parser.parse_args(arguments)
    if parsed.lock and not set(parsed.sets) <= {"lowest", "highest"}:
        parser.error("--lock writes lowest and highest only")
    return max(run(name, parsed) for name in parsed.sets)


def run(name: str, parsed: argparse.Namespace) -> int:
    """Makes a set's environment, runs the tests in it, and prints its row."""
    file = {"tested": ROOT / "constraints.txt"}.get(name, LOCKS / f"{name}.txt")
    file = Path(name).resolve() if name not in ("lowest", "highest", "tested") else file
    python = subprocess.run(
        [parsed.python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    venv = ROOT / "build" / "versions" / f"{file.stem}-python{python}"
    venv.parent.mkdir(parents=True, exist_ok=True)
    # Most of what is installed is never imported: what is, the first process compiles. (For pip, 0 is `--no-compile`.)
    environment = {**os.environ, "VENV": str(venv), "PYTHON": parsed.python, "PIP_NO_COMPILE": "0"}
    if parsed.lock:
        lock(name, file, venv, environment)
    target = "test" if parsed.whole else "test-quick" if parsed.quick else "test-smoke"
    if target == "test-smoke":
        environment["PACKAGES"] = SMOKE
    log = venv.with_name(f"{venv.name}.log")
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        words = ["make", target, f"VENV={venv}", f"CONSTRAINTS={file}"]
        process = subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert process.stdout is not None
        for line in process.stdout:
            stream.write(line.decode(errors="replace"))
            stream.flush()
            if not parsed.whole:
                sys.stdout.write(line.decode(errors="replace"))
                sys.stdout.flush()
    code = process.wait()
    print(row(name, python, venv, log.read_text(encoding="utf-8"), time.monotonic() - start), flush=True)
    if not parsed.keep:
        shutil.rmtree(venv, ignore_errors=True)
    return int(code != 0)


def lock(name: str, file: Path, venv: Path, environment: dict[str, str]) -> None:
    """Resolves a set: the lower bound of each requirement, or the newest release of each."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = []
    if name == "lowest":
        bounds = (re.match(r"([\w-]+)>=([\w.]+)", requirement) for requirement in project["dependencies"])
        pinned = [f"{bound[1]}=={bound[2]}" for bound in bounds if bound is not None]
    shutil.rmtree(venv, ignore_errors=True)
    wanted = venv.with_name(f"{venv.name}.in")
    wanted.write_text("\n".join(pinned) + "\n", encoding="utf-8")
    subprocess.run([ROOT / "scripts/setup.sh"], env={**environment, "CONSTRAINTS": str(wanted)}, check=True)
    frozen = subprocess.run(
        [venv / "bin/python", "-m", "pip", "freeze", "--exclude-editable", "--disable-pip-version-check"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # Without torch's build label (+cpu, +cu130), so that the pin holds for every build of that release.
    lines = (re.sub(r"\+[a-z0-9.]*$", "", line) for line in frozen.splitlines() if "==" in line)
    file.write_text(HEADER.format(name=name) + "\n".join(lines) + "\n", encoding="utf-8")


def row(name: str, python: str, venv: Path, said: str, seconds: float) -> str:
    """A row of the table: the set, its versions, and how the tests ended."""
    code = f"from importlib.metadata import version; print(*map(version, {SHOWN!r}))"
    found = subprocess.run([venv / "bin/python", "-c", code], capture_output=True, text=True, check=False)
    versions = found.stdout.split() or ["-"] * len(SHOWN)
    ended = re.findall(r"^(?:=+ )?((?:\d+ \w+, )*\d+ (?:passed|failed|errors?)[^=\n]*?) in [\d.]+s", said, re.MULTILINE)
    return " | ".join(
        ["", name, python, *versions, ended[-1] if ended else "no test ran", f"{seconds:.0f} s", ""]
    ).strip()


if __name__ == "__main__":
    raise SystemExit(main())

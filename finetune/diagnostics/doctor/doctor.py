"""Runs all checks of `finetune doctor` and shows what they find."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from rich.console import Console

from finetune.config.recipe import load_recipe
from finetune.diagnostics.doctor import machine_checks, network_checks, package_checks
from finetune.diagnostics.doctor.finding import Asked, Finding, failure
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.console import plain_console
from finetune.utils.errors import FinetuneError

Check = Callable[[Asked], Iterable[Finding]]

# In the order of the report. Each looks at one thing, and says at least one line.
CHECKS: list[Check] = [
    package_checks.python,
    package_checks.packages,
    machine_checks.gpus,
    machine_checks.dtypes,
    machine_checks.agreement,
    machine_checks.ops,
    package_checks.kernels,
    machine_checks.folders,
    machine_checks.shared_memory,
    network_checks.port,
    network_checks.hostname,
    network_checks.first_machine,
    network_checks.clock,
    network_checks.reach,
    machine_checks.threads,
    machine_checks.files,
    machine_checks.overriding,
    network_checks.interfaces,
    network_checks.all_reduce,
]


def ask(
    recipe: str | None,
    overrides: Sequence[str],
    config_file: str | None,
    options: Mapping[str, str],
    env: Mapping[str, str],
) -> tuple[Asked, list[Finding]]:
    """Reads what a run is asked for; what cannot be read is a finding, and the rest is examined all the same."""
    found: dict[str, Any] = {}
    problems: list[Finding] = []
    readers: dict[str, Callable[[], object]] = {}
    if recipe is not None:
        readers["recipe"] = lambda: load_recipe(recipe, overrides, BUILT_IN)
    if config_file is not None:
        readers["foreseen"] = lambda: predict_environment(config_file, options, env)
    for name, reader in readers.items():
        try:
            found[name] = reader()
        except FinetuneError as error:
            texts = [line.strip() for line in error.lines if line.startswith("  ")] or [str(error)]
            problems += [failure("recipe" if name == "recipe" else "launch file", text) for text in texts]
    if recipe is None and overrides:
        named = f"got {' '.join(overrides)}, but no recipe that this would change"
        problems.append(failure("recipe", named, "name one with --recipe RECIPE"))
    return Asked(env=env, **found), problems


def examine(asked: Asked, begin: Callable[[str], None]) -> Iterable[Finding]:
    """Runs every check.

    Args:
        begin: Is told what is looked at.
    """
    for check in CHECKS:
        begin(check.__name__.replace("_", " "))
        try:
            yield from check(asked)
        except (FinetuneError, OSError) as error:  # the latter: what is looked at cannot be read
            yield failure(check.__name__.replace("_", " "), str(error))
        except ImportError as error:
            yield failure(check.__name__.replace("_", " "), f"cannot be looked at: {error}", "install it: `make setup`")


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects, one a finding."""
    return json.dumps([vars(finding) for finding in findings], indent=2)


def report(asked: Asked, findings: Sequence[Finding], *, quiet: bool) -> list[Finding]:
    """Runs every check and shows what it finds at once, unless `quiet`; returns all findings, the given ones first."""
    out, styles = plain_console(), {"warning": "yellow", "failure": "red"}
    shown: list[Finding] = []
    # What is looked at shows on a terminal only.
    with Console(stderr=True).status("") as status:
        for finding in chain(findings, examine(asked, lambda what: status.update(f"looking at {what}"))):
            shown.append(finding)
            if not quiet:
                out.print(as_text(finding), style=styles.get(finding.status))
    return shown


def as_text(finding: Finding) -> str:
    """A finding, and below it what to do."""
    mark = "FAILURE" if finding.status == "failure" else finding.status
    text = f"{mark:<7}  {finding.check}: {' '.join(finding.found.split())}"
    return f"{text}\n         -> {finding.advice}" if finding.advice else text

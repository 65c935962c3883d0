"""Runs all checks of `finetune doctor` and shows their results."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from rich.console import Console

from finetune.config.recipe import load_recipe
from finetune.config.recipe_paths import check_paths
from finetune.diagnostics.doctor import machine_checks, network_checks
from finetune.diagnostics.doctor.check_result import Asked, CheckResult, failure
from finetune.distributed.launch.predicted_environment import predict_environment
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.console import plain_console
from finetune.utils.errors import FinetuneError

Check = Callable[[Asked], Iterable[CheckResult]]

# In the order of the report. Each looks at one thing, and says at least one line.
CHECKS: list[Check] = [
    machine_checks.python,
    machine_checks.packages,
    machine_checks.gpus,
    machine_checks.dtypes,
    machine_checks.agreement,
    machine_checks.ops,
    machine_checks.kernels,
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


def read_request(
    recipe: str | None,
    overrides: Sequence[str],
    config_file: str | None,
    options: Mapping[str, str],
    env: Mapping[str, str],
) -> tuple[Asked, list[CheckResult]]:
    """Reads recipe and launch file, and looks for the files that the recipe names, before anything slow is imported.

    What cannot be read is a result, and the rest is checked all the same.
    """
    values: dict[str, Any] = {}
    problems: list[CheckResult] = []

    @contextmanager
    def reported(what: str) -> Iterator[None]:
        try:
            yield
        except FinetuneError as error:
            texts = [line.strip() for line in error.lines if line.startswith("  ")] or [str(error)]
            problems.extend(failure(what, text) for text in texts)

    if recipe is not None:
        with reported("recipe"):
            values["recipe"] = load_recipe(recipe, overrides, BUILT_IN)
            check_paths(values["recipe"])
    elif overrides:
        named = f"got {' '.join(overrides)}, but no recipe that this would change"
        problems.append(failure("recipe", named, "name one with --recipe RECIPE"))
    if config_file is not None:
        with reported("launch file"):
            values["foreseen"] = predict_environment(config_file, options, env)
    return Asked(env=env, **values), problems


def run_checks(
    asked: Asked, begin: Callable[[str], None], checks: Sequence[Check] | None = None
) -> Iterable[CheckResult]:
    """Runs every check, or those that are given; `begin` shows what is looked at."""
    for check in CHECKS if checks is None else checks:
        name = getattr(check, "__name__", "machines").replace("_", " ")
        begin(name)
        try:
            yield from check(asked)
        except (FinetuneError, OSError) as error:  # the latter: what is looked at cannot be read
            yield failure(name, str(error))
        except ImportError as error:
            yield failure(name, f"cannot be looked at: {error}", "install it: `make setup`")


def report_checks(
    asked: Asked, problems: Sequence[CheckResult], *, quiet: bool, checks: Sequence[Check] | None = None
) -> list[CheckResult]:
    """Runs every check, or those given, and shows results at once, unless `quiet`; returns all, `problems` first."""
    out, styles = plain_console(), {"warning": "yellow", "failure": "red"}
    shown: list[CheckResult] = []
    # What is looked at shows on a terminal only.
    with Console(stderr=True).status("") as status:
        for result in chain(problems, run_checks(asked, lambda what: status.update(f"looking at {what}"), checks)):
            shown.append(result)
            if not quiet:
                out.print(result_as_text(result), style=styles.get(result.status))
    return shown


def result_as_text(result: CheckResult) -> str:
    """Returns a result, and below it what to do."""
    mark = "FAILURE" if result.status == "failure" else result.status
    text = f"{mark:<7}  {result.check}: {' '.join(result.found.split())}"
    return f"{text}\n         -> {result.advice}" if result.advice else text

"""Writes the report of runs: the page, and pictures beside it."""

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from finetune.checkpoint.run_history import RunHistory, read_run
from finetune.diagnostics.run_report import page
from finetune.diagnostics.run_report.memory_prediction import predicted_peak
from finetune.utils import atomic_files
from finetune.utils.errors import RecipeError

EXTRA = ("plotly", "matplotlib")

# Runs that a folder is named after; a name may have 255 bytes.
_MOST_NAMES = 4


def write_report(directories: Sequence[Path], to: Path | None = None, *, price: float | None = None) -> list[Path]:
    """Writes the report of one run, or of several over each other.

    Args:
        to: The page; if left out, `RUN/report/report.html` for one run, for several `report.html` in a folder here
            that is named after them.
        price: Price of a GPU (or a process on CPUs) and hour.

    Returns:
        The files, the page first.

    Raises:
        FinetuneError: If a run cannot be read, or the page not be written.
    """
    check_options(price)
    runs = named_runs([(directory, read_run(directory)) for directory in directories])
    names = [run.name for _, run in runs]
    if len(names) > _MOST_NAMES:
        names[_MOST_NAMES - 1 :] = [f"{len(names) - _MOST_NAMES + 1}-more"]
    folder = directories[0] / "report" if len(runs) == 1 else Path("-".join(["report", *names]))
    file = to or folder / "report.html"
    _check_file(file)
    prediction = predicted_peak(runs[0][1]) if len(runs) == 1 else None
    shown = page.content_of(runs, price=price, prediction=prediction)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write_text(file, page.page_of(shown))
        from finetune.diagnostics.run_report.png_charts import write_pictures

        return [file, *write_pictures(shown.charts, runs[0][0] if len(runs) == 1 else f"{len(runs)} runs", file)]
    except OSError as error:
        raise RecipeError(
            f"--to: cannot write {file}: {error.strerror or error}. Name another file by --to FILE.html."
        ) from error


def named_runs(found: Sequence[tuple[Path, RunHistory]]) -> list[tuple[str, RunHistory]]:
    """Returns runs with the names of their directories, or their paths where two are named alike."""
    unique = len({run.name for _, run in found}) == len(found)
    return [(run.name if unique else str(directory), run) for directory, run in found]


def check_options(price: float | None) -> None:
    """Raises RecipeError if a library that draws is not installed, or a price is no number from 0 on."""
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise RecipeError(
            f"finetune report needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            "installed. Install the extra: pip install 'finetune[report]'. `finetune watch` and `finetune runs` work "
            "without it."
        )
    if price is not None and not (math.isfinite(price) and price >= 0.0):
        raise RecipeError(f"--price is {price}; give what a GPU, or a process on CPUs, costs an hour, such as 2.5.")


def _check_file(file: Path) -> None:
    """Raises RecipeError if a file is there that is no report."""
    if file.is_dir() or file.suffix.lower() not in (".html", ".htm"):
        raise RecipeError(f"--to: {file} is not the name of a page. Give a file that ends in .html.")
    try:
        with file.open("rb") as there:
            head = there.read(1024).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RecipeError(f"--to: {file} cannot be read: {error.strerror}. Name another file.") from error
    if page.GENERATOR not in head:
        raise RecipeError(f"--to: {file} is there, and is no report of this toolkit. Name another file, or remove it.")

"""What the commands `parity`, `replay` and `comms` take, and what they do."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.recipe import load


def add(verbs: Any) -> None:
    """Adds the commands to a parser's."""
    verb = verbs.add_parser(
        "parity", help="train a recipe under several launch configs, or take finished runs, and compare their paths"
    )
    verb.add_argument("recipe", help="a recipe, or the directory of a finished run")
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="for a recipe; else a second run")
    verb.add_argument(
        "--on", metavar="A,B,…", help="names of accelerate_configs/, or files; the first is the reference"
    )
    verb.add_argument("--steps", type=int, default=20, help="optimiser steps of each run; 20 if left out")
    verb.add_argument("--shrink", action="store_true", help="a small random network of the same architecture")
    verb.add_argument("--inject", metavar="FAULT", help="break the last one on purpose, to see that it is caught")
    verb.add_argument("--to", metavar="DIR", help="keep the runs there; else they are kept only where they differ")
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    verb = verbs.add_parser("replay", help="take a step of a run again, exactly, and show its batch, loss and gradient")
    verb.add_argument("run", help="a run directory, such as runs/sample; nothing in it changes")
    verb.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1, as in metrics.jsonl")
    verb = verbs.add_parser("comms", help="measure collectives between processes, beside what a ring could do")
    verb.add_argument("--processes", type=int, metavar="N", help="on this machine; 2, or those of --config_file")
    verb.add_argument("--config_file", help="a launch file, for its processes and machines")
    verb.add_argument("--min-bytes", type=int, default=1024)
    verb.add_argument("--max-bytes", type=int, help="16 MiB without a GPU, 1 GiB with one, if left out")
    verb.add_argument("--factor", type=int, default=4, help="from one size to the next; 4 if left out")
    verb.add_argument("--json", metavar="FILE", help="also write the result there")


def parity(parsed: argparse.Namespace, write: Callable[[str], None], say: Callable[[str], None]) -> int:
    """`finetune parity`; returns 1 if the runs are not on one path.

    Args:
        write: Takes the result.
        say: Takes what is said on the way.
    """
    if not Path(parsed.recipe).is_dir():
        return _launched(parsed, write, say)
    if len(parsed.overrides) != 1 or parsed.on or parsed.inject or parsed.shrink or parsed.to:
        raise RecipeError(
            f"{parsed.recipe} is a directory: finished runs are compared as `finetune parity RUN_A RUN_B`, with no "
            "option but --json. To launch, give a recipe and `--on single,ddp`."
        )
    from finetune.parity.compare import compare
    from finetune.parity.finished import read

    places = [Path(parsed.recipe), Path(parsed.overrides[0])]
    names = [place.name for place in places]
    runs = [
        read(place, name if len(set(names)) == 2 else str(place)) for place, name in zip(places, names, strict=True)
    ]
    return _result(parsed, write, [compare(*runs)])


def _launched(parsed: argparse.Namespace, write: Callable[[str], None], say: Callable[[str], None]) -> int:
    if not parsed.on:
        raise RecipeError(
            "finetune parity RECIPE needs --on, such as `--on single,ddp`. (To compare two runs that have ended, give "
            f"their directories; {parsed.recipe} is none.)"
        )
    recipe = load(parsed.recipe, parsed.overrides)
    from finetune.parity import launches
    from finetune.parity.compare import compare
    from finetune.recipe import hint

    if parsed.inject is not None and parsed.inject not in launches.FAULTS:
        known = list(launches.FAULTS)
        raise RecipeError(
            f"--inject: there is no fault '{parsed.inject}'{hint(parsed.inject, known)}; there are {', '.join(known)}."
        )
    configs = launches.find(parsed.on)
    folder = Path(parsed.to) if parsed.to else Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    holds = False
    try:
        written = launches.prepare(recipe, configs, folder, steps=parsed.steps, shrink=parsed.shrink)
        runs = []
        for config in configs:
            fault = parsed.inject if config is configs[-1] else None
            place = folder / config.name
            runs.append(launches.run(config, written[config.name], place, fault=fault, say=say))
        comparisons = [compare(runs[0], other) for other in runs[1:]]
        code = _result(parsed, write, comparisons)
        holds = code == 0
        if parsed.inject is not None:
            seen = "caught" if not comparisons[-1].holds else "NOT caught: it changes nothing in this recipe"
            say(f"{configs[-1].name} was broken on purpose by {parsed.inject}, which was {seen}")
        return code
    finally:
        if parsed.to is None and (holds or not any((folder / config.name).exists() for config in configs)):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            say(f"the runs are in {folder}")


def _result(parsed: argparse.Namespace, write: Callable[[str], None], comparisons: list[Any]) -> int:
    from finetune.parity import table

    if parsed.json:
        write(json.dumps(table.to_json(comparisons), indent=2) + "\n")
    else:
        write("\n".join(table.lines(comparisons)) + "\n")
    return 0 if all(comparison.holds for comparison in comparisons) else 1


def replay(parsed: argparse.Namespace, write: Callable[[str], None]) -> int:
    """`finetune replay`; returns 1 if the step is not what the run has written down."""
    from finetune.replay import replay as run

    found = run(Path(parsed.run), parsed.step)
    write("\n".join(found.lines()) + "\n")
    return 0 if found.holds else 1


def comms(parsed: argparse.Namespace, write: Callable[[str], None]) -> None:
    """`finetune comms`: in a process that a launcher started it measures; in any other it launches itself."""
    if "WORLD_SIZE" not in os.environ:
        from finetune.launcher import launch

        if parsed.processes is not None and parsed.processes < 2:
            raise RecipeError(f"--processes {parsed.processes}: one alone has nobody to talk to. Take two at least.")
        if parsed.json is not None and not Path(parsed.json).absolute().parent.is_dir():
            raise RecipeError(f"--json {parsed.json}: there is no folder {Path(parsed.json).parent}. Make it first.")
        shipped = Path(__file__).resolve().parents[1] / "accelerate_configs" / "ddp.yaml"
        if parsed.config_file is None and parsed.processes is None:
            parsed.processes = 2
        options = [] if parsed.processes is None else ["--num_processes", str(parsed.processes)]
        given = {"--min-bytes": parsed.min_bytes, "--max-bytes": parsed.max_bytes, "--factor": parsed.factor}
        words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        file = [] if parsed.json is None else ["--json", parsed.json]
        launch(parsed.config_file or str(shipped), options, ["comms", *words, *file], module="finetune")
    from finetune import comms as measured

    sizes = (parsed.min_bytes, parsed.max_bytes, parsed.factor)
    said = measured.run(sizes, Path(parsed.json) if parsed.json else None)
    if said is not None:
        write("\n".join(said) + "\n")

"""What each command takes, and what it does."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.config.recipe import load_recipe
from finetune.config.recipe_schema import Recipe
from finetune.utils.errors import RecipeError
from finetune.utils.repository import ROOT

if TYPE_CHECKING:
    from finetune.export.load_model import LoadedModel


def add_run_commands(verbs: Any) -> None:
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
    from finetune.diagnostics.parity.compare import compare
    from finetune.diagnostics.parity.finished_run import read

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
    recipe = load_recipe(parsed.recipe, parsed.overrides)
    from finetune.config.recipe import hint
    from finetune.diagnostics.parity import launch_runs
    from finetune.diagnostics.parity.compare import compare

    if parsed.inject is not None and parsed.inject not in launch_runs.FAULTS:
        known = list(launch_runs.FAULTS)
        raise RecipeError(
            f"--inject: there is no fault '{parsed.inject}'{hint(parsed.inject, known)}; there are {', '.join(known)}."
        )
    configs = launch_runs.find(parsed.on)
    folder = Path(parsed.to) if parsed.to else Path(tempfile.mkdtemp(prefix="finetune-parity-"))
    holds = False
    try:
        written = launch_runs.prepare(recipe, configs, folder, steps=parsed.steps, shrink=parsed.shrink)
        runs = []
        for config in configs:
            fault = parsed.inject if config is configs[-1] else None
            place = folder / config.name
            runs.append(launch_runs.run(config, written[config.name], place, fault=fault, say=say))
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
    from finetune.diagnostics.parity import parity_report

    if parsed.json:
        write(json.dumps(parity_report.to_json(comparisons), indent=2) + "\n")
    else:
        write("\n".join(parity_report.lines(comparisons)) + "\n")
    return 0 if all(comparison.holds for comparison in comparisons) else 1


def replay(parsed: argparse.Namespace, write: Callable[[str], None]) -> int:
    """`finetune replay`; returns 1 if the step is not what the run has written down."""
    from finetune.diagnostics.replay import replay as run

    found = run(Path(parsed.run), parsed.step)
    write("\n".join(found.lines()) + "\n")
    return 0 if found.holds else 1


def comms(parsed: argparse.Namespace, write: Callable[[str], None]) -> None:
    """`finetune comms`: in a process that a launcher started it measures; in any other it launches itself."""
    if "WORLD_SIZE" not in os.environ:
        from finetune.distributed.launch.launcher import launch

        if parsed.processes is not None and parsed.processes < 2:
            raise RecipeError(f"--processes {parsed.processes}: one alone has nobody to talk to. Take two at least.")
        if parsed.json is not None and not Path(parsed.json).absolute().parent.is_dir():
            raise RecipeError(f"--json {parsed.json}: there is no folder {Path(parsed.json).parent}. Make it first.")
        shipped = ROOT / "accelerate_configs" / "ddp.yaml"
        if parsed.config_file is None and parsed.processes is None:
            parsed.processes = 2
        options = [] if parsed.processes is None else ["--num_processes", str(parsed.processes)]
        given = {"--min-bytes": parsed.min_bytes, "--max-bytes": parsed.max_bytes, "--factor": parsed.factor}
        words = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        file = [] if parsed.json is None else ["--json", parsed.json]
        launch(parsed.config_file or str(shipped), options, ["comms", *words, *file], module="finetune")
    from finetune.distributed import measure_bandwidth

    sizes = (parsed.min_bytes, parsed.max_bytes, parsed.factor)
    said = measure_bandwidth.run(sizes, Path(parsed.json) if parsed.json else None)
    if said is not None:
        write("\n".join(said) + "\n")


def add_plan_command(verbs: Any) -> argparse.ArgumentParser:
    """Adds the command to a parser's."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "plan", help="memory, time, traffic and cost of a recipe under every launch file, before it is launched"
    )
    parser.add_argument("--gpu", default="h100-80gb", help="a known GPU, or figures: memory=24,bf16=70,link=32")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="of a machine (8)")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="machines (1)")
    parser.add_argument("--network", type=float, default=50.0, metavar="GB/s", help="between machines, a GPU (50)")
    parser.add_argument(
        "--links", action="append", default=[], metavar="FILE", help="measured by `finetune comms --json FILE`"
    )
    parser.add_argument(
        "--mfu", type=float, default=0.4, metavar="SHARE", help="of the peak rate that is reached (0.4)"
    )
    parser.add_argument("--host", type=float, metavar="GiB", help="host memory of a machine, for what is offloaded")
    parser.add_argument("--price", type=float, metavar="MONEY", help="of a GPU and hour")
    parser.add_argument("--energy", action="store_true", help="also say what the GPUs take, at their design power")
    parser.add_argument("--stored", choices=("fp32", "bf16", "fp16"), help="dtype of stored weights, if none are here")
    parser.add_argument("--configs", metavar="DIR", help="launch files; accelerate_configs/ if left out")
    parser.add_argument("--write", metavar="FILE", help="write the launch file that is recommended")
    parser.add_argument(
        "--trace",
        nargs="?",
        const="recommended",
        metavar="A,B,…",
        help="also run a step under fake tensors: of what is recommended, of the launch files named, or of `all`",
    )
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    return parser


def plan(parsed: argparse.Namespace, recipe: Recipe) -> None:
    """`finetune plan`."""
    from rich.console import Console

    from finetune.planning import plan_report
    from finetune.planning.planner import machines_of, make, write
    from finetune.planning.trace import trace_launches

    plan = make(recipe, machines_of(parsed), Path(parsed.configs) if parsed.configs else None, parsed.stored)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    found = None
    if parsed.trace:
        aside = Console(stderr=True, highlight=False)
        say = aside.print if aside.is_terminal else lambda _: None
        found = trace_launches.trace(plan, trace_launches.wanted(plan, parsed.trace), parsed.stored, say)
    if parsed.json:
        console.print(plan_report.as_json(plan, found), markup=False)
    else:
        plan_report.print_plan(plan, console, energy=parsed.energy)
        if found is not None:
            plan_report.print_traced(found, console)
    if parsed.write:
        write(plan, Path(parsed.write))
        if not parsed.json:
            console.print(f"Written: {parsed.write}", markup=False)


def add_model_commands(verbs: Any) -> None:
    """Adds the three commands to a parser's."""
    verb = verbs.add_parser(
        "export", help="write a run's adapter or merged model, and prove that it is what was trained"
    )
    verb.add_argument("run", help="a run directory, such as runs/sample, or one of its checkpoints")
    verb.add_argument("--as", dest="kind", required=True, choices=("adapter", "merged", "merged-16bit"))
    verb.add_argument("--to", metavar="DIR", help="the new folder; RUN/exports/KIND if left out")
    verb.add_argument("--shard-size", default="5GB", help="most that one file takes, such as 5GB")
    verb.add_argument("--push-to", metavar="NAME", help="then upload it to the hub, as a private model of this name")
    _place(verb)
    verb = verbs.add_parser("generate", help="let a run, checkpoint, adapter or export write")
    verb.add_argument("run", help="a run, checkpoint, adapter, export, model directory or hub name")
    verb.add_argument("--prompt", required=True, help="what it writes on from, or with --chat answers")
    verb.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    verb.add_argument("--max-new-tokens", type=int, default=200)
    verb.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    verb.add_argument("--top-k", type=int)
    verb.add_argument("--top-p", type=float)
    verb.add_argument("--seed", type=int, default=0)
    _place(verb)
    _trust(verb)
    verb = verbs.add_parser("eval", help="loss and perplexity of a run, checkpoint, adapter or export on files")
    verb.add_argument("run", help="a run, checkpoint, adapter, export, model directory or hub name")
    verb.add_argument("--data", required=True, nargs="+", metavar="FILE", help="what the recipe's `path` may be")
    verb.add_argument("--text-field", help="the field that holds the text, if not that of the run's data, or `text`")
    verb.add_argument("--chat", action="store_true", help="the files hold conversations; runs on such know it")
    _place(verb)
    _trust(verb)


def _place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--step", type=int, help="of a run, the checkpoint's step; the last one if left out")
    verb.add_argument("--base", help="where the base lies now, if not where the run or adapter says")


def _trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that ships with the model; a run's recipe says it",
    )


def export(parsed: argparse.Namespace, write: Callable[[str], None]) -> None:
    """`finetune export`."""
    from finetune.export import push_to_hub
    from finetune.export.write import export as run

    if parsed.push_to is not None:
        push_to_hub.check(parsed.push_to)  # before the work, not after it
    to = Path(parsed.to) if parsed.to else None
    options = {"to": to, "step": parsed.step, "base": parsed.base, "shard_size": parsed.shard_size}
    folder = run(Path(parsed.run), parsed.kind, lambda line: write(line + "\n"), **options)
    if parsed.push_to is not None:
        write(f"Uploaded: {push_to_hub.push(folder, parsed.push_to)}\n")


def generate(parsed: argparse.Namespace, write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """`finetune generate`.

    Args:
        say: Is told what must not stand among the text.
    """
    from finetune.export import generate_text

    manner = generate_text.SamplingOptions(
        parsed.max_new_tokens, parsed.temperature, parsed.top_k, parsed.top_p, parsed.seed
    )
    place = _open(parsed, say)
    if not parsed.chat:
        write(parsed.prompt)
    generate_text.generate(place, parsed.prompt, manner, write, chat=parsed.chat)
    write("\n")


def evaluate(parsed: argparse.Namespace, write: Callable[[str], None], say: Callable[[str], None]) -> None:
    """`finetune eval`.

    Args:
        say: Is told what is no result.
    """
    from finetune.export import evaluate_files

    place = _open(parsed, say, exact=True)
    with evaluate_files.told_in_flags():
        recipe = evaluate_files.recipe_of(place, parsed.data, text_field=parsed.text_field, chat=parsed.chat)
        found = evaluate_files.score(place, recipe)
    write(
        f"validation loss {found['loss']:.5f}, perplexity {found['perplexity']:.4f}, over {found['targets']:,} targets "
        f"in rows of {recipe.data.sequence_length} tokens\n"
    )


def _open(parsed: argparse.Namespace, say: Callable[[str], None], *, exact: bool = False) -> "LoadedModel":
    from finetune.export.load_model import load_model

    trusted = parsed.trust_remote_code
    place = load_model(parsed.run, step=parsed.step, base=parsed.base, exact=exact, trust_remote_code=trusted)
    for line in place.lines:
        say(line)
    return place

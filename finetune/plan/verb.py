"""The command `plan`: what it takes, and what it does."""

import argparse
from pathlib import Path
from typing import Any

from finetune.recipe import Recipe


def add(verbs: Any) -> argparse.ArgumentParser:
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


def run(parsed: argparse.Namespace, recipe: Recipe) -> None:
    """`finetune plan`."""
    from rich.console import Console

    from finetune.plan import show, traced
    from finetune.plan.made import machines_of, make, write

    plan = make(recipe, machines_of(parsed), Path(parsed.configs) if parsed.configs else None, parsed.stored)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 160
    found = None
    if parsed.trace:
        aside = Console(stderr=True, highlight=False)
        say = aside.print if aside.is_terminal else lambda _: None
        found = traced.trace(plan, traced.wanted(plan, parsed.trace), parsed.stored, say)
    if parsed.json:
        console.print(show.as_json(plan, found), markup=False)
    else:
        show.print_plan(plan, console, energy=parsed.energy)
        if found is not None:
            show.print_traced(found, console)
    if parsed.write:
        write(plan, Path(parsed.write))
        if not parsed.json:
            console.print(f"Written: {parsed.write}", markup=False)

"""The command line: `finetune <verb>`, and what each verb takes."""

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from finetune import __version__
from finetune.cli import completion
from finetune.distributed.launch.launch_options import OPTIONS
from finetune.training.entry_point import DRY_RUN_HELP, add_recipe_arguments
from finetune.utils.exit_codes import guarded
from finetune.utils.shipped_files import launch_file, recipe_file

_PATHS = {"base", "configs", "data", "directory", "folder", "harness", "json", "links", "model", "run", "to", "write"}
"""Arguments that are paths, or may be; recipes and launch files are found by name as well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """`finetune <verb> …`; returns the exit code."""
    parser = _build_parser()
    completion.answer(parser)
    parsed = _parse(parser, arguments)
    # Not for `--help`: the recipe's schema takes longer to build than all of it.
    from finetune.cli.commands import COMMANDS

    return guarded(partial(COMMANDS[parsed.verb], parsed))


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line; the words of a list may also come behind options, which argparse takes amiss."""
    parsed, left = parser.parse_known_args(arguments)
    lists = (getattr(parsed, name, None) for name in ("overrides", "words", "run"))
    more = next((words for words in lists if isinstance(words, list)), None)
    if left and (more is None or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if more is not None:
        more += left
    for name in _PATHS & vars(parsed).keys():
        setattr(parsed, name, _at_home(getattr(parsed, name)))
    return parsed


def _at_home(value: Any) -> Any:
    """Paths with the home directory in place of `~`, which no shell puts there behind `=` or within quotes."""
    if isinstance(value, list):
        return [_at_home(word) for word in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def _build_parser() -> argparse.ArgumentParser:
    parser = completion.CompletingParser(prog="finetune", description="Fine-tuning on every backend.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_recipe_commands(verbs)
    _add_model_commands(verbs)
    _add_run_commands(verbs)
    _add_report_commands(verbs)
    _add_plan(verbs)
    verb = verbs.add_parser("schema", help="print the JSON schema of recipes, for editors")
    verb.add_argument("--path", action="store_true", help="print where the installed package has it as a file")
    verb = verbs.add_parser("completion", help="print what completes commands, keys, launch files and runs in a shell")
    verb.add_argument("shell", choices=completion.SHELLS)
    verbs.add_parser("ops", help="build native ops ahead of the first run that needs them")
    return parser


def _add_recipe_commands(verbs: Any) -> None:
    verb = verbs.add_parser("init", help="write a small project that runs as it is: recipe, launch files, README")
    verb.add_argument("folder", nargs="?", default=".", metavar="DIR", help="where; the working directory if left out")
    verb.add_argument("--task", choices=("lm", "chat", "classify", "custom"), default="lm", help="lm if left out")
    verb.add_argument("--model", help="a directory or hub name; a small network from nothing if left out")
    verb.add_argument("--data", metavar="FILE", help="file, glob or directory; built-in data if left out")
    adapters = verb.add_mutually_exclusive_group()
    for kind, what in (("lora", "train adapters"), ("qlora", "train adapters on a model in 4 bits")):
        adapters.add_argument(f"--{kind}", dest="adapters", action="store_const", const=kind, help=what)
    verb = verbs.add_parser("launch", help="train, like `accelerate launch`, but check both files first")
    _launch_arguments(verb, required=True)
    add_recipe_arguments(verb)
    verb.add_argument("--dry-run", action="store_true", help=DRY_RUN_HELP)
    verb.add_argument("--quiet", action="store_true", help="print errors only")
    verb = verbs.add_parser("explain", help="show where each value comes from, what it overrides, and what it means")
    _launch_arguments(verb, required=False)
    verb.add_argument("recipe", type=recipe_file, help="a recipe, by name or path: sample, my/recipe.yaml")
    verb.add_argument(
        "words", nargs="*", metavar="KEY | key.key=value", help="a key to explain; values to explain with"
    )
    verb.add_argument("--all", action="store_true", help="also show default values")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb = verbs.add_parser("doctor", help="check whether this machine can run a recipe, and what to fix")
    _launch_arguments(verb, required=False)
    verb.add_argument("--recipe", type=recipe_file, help="a recipe, by name or path: sample, my/recipe.yaml")
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="instead of the recipe's values")
    verb.add_argument("--json", action="store_true", help="for programs")
    verb = verbs.add_parser("data", help="prepare a recipe's data and print its report")
    verb.add_argument("--show", type=int, metavar="N", help="also print N examples as tokens, the learned ones marked")
    add_recipe_arguments(verb)
    add_recipe_arguments(verbs.add_parser("show", help="print the whole recipe, defaults included"))
    verb = verbs.add_parser("audit", help="verify that each row of each epoch was used exactly once")
    verb.add_argument("run", help="a run directory, such as runs/sample")
    verb.add_argument("--steps", metavar="A:B", help="also list the rows that steps A to B used, counted from 1")


def _add_model_commands(verbs: Any) -> None:
    verb = verbs.add_parser("export", help="write a run's adapter or merged model, and verify it")
    verb.add_argument("run", help="a run directory, such as runs/sample, or one of its checkpoints")
    verb.add_argument("--as", dest="kind", required=True, choices=("adapter", "merged", "merged-16bit"))
    verb.add_argument("--to", metavar="DIR", help="the new folder; RUN/exports/KIND if left out")
    verb.add_argument("--shard-size", default="5GB", help="most that one file takes, such as 5GB")
    verb.add_argument("--push-to", metavar="NAME", help="then upload it to the hub, as a private model of this name")
    _place(verb)
    _trust(verb)
    verb = verbs.add_parser("generate", help="generate text from a run, checkpoint, adapter or export")
    verb.add_argument("run", help="a run, checkpoint, adapter, export, model directory or hub name")
    verb.add_argument("--prompt", required=True, help="the text to continue, or with --chat to answer")
    verb.add_argument("--chat", action="store_true", help="put the prompt into the tokenizer's chat template")
    verb.add_argument("--max-new-tokens", type=int, default=200)
    verb.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    verb.add_argument("--top-k", type=int)
    verb.add_argument("--top-p", type=float)
    verb.add_argument("--seed", type=int, default=0)
    _place(verb)
    _trust(verb)
    verb = verbs.add_parser("eval", help="evaluate a run, checkpoint, adapter or export on files or on benchmarks")
    verb.add_argument("run", help="a run, checkpoint, adapter, export, model directory or hub name")
    on = verb.add_mutually_exclusive_group(required=True)
    on.add_argument("--data", nargs="+", metavar="FILE", help="loss and perplexity on files; what `path` may be")
    on.add_argument(
        "--harness", nargs="+", metavar="TASK", help="tasks of lm-evaluation-harness: names, task files or folders"
    )
    verb.add_argument("--text-field", help="the field that holds the text, if not that of the run's data, or `text`")
    verb.add_argument(
        "--chat",
        action="store_true",
        help="--data: the files hold conversations, which runs on such know; --harness: apply the chat template",
    )
    verb.add_argument("--num-fewshot", type=int, metavar="N", help="--harness: examples before each question")
    verb.add_argument("--limit", type=int, metavar="N", help="--harness: the first N questions of each task only")
    verb.add_argument("--batch-size", type=int, metavar="N", help="--harness: texts in a forward pass; 8 if left out")
    verb.add_argument("--json", action="store_true", help="for programs")
    _place(verb)
    _trust(verb)


def _add_run_commands(verbs: Any) -> None:
    verb = verbs.add_parser(
        "parity",
        help="train a recipe under several launch configs, or take two finished runs, and compare them step by step",
    )
    verb.add_argument("recipe", type=recipe_file, help="a recipe, by name or path, or the directory of a finished run")
    verb.add_argument("overrides", nargs="*", metavar="key.key=value", help="for a recipe; else a second run")
    verb.add_argument(
        "--on", metavar="A,B,…", help="names of accelerate_configs/, or files; the first is the reference"
    )
    verb.add_argument("--steps", type=int, default=20, help="optimiser steps of each run; 20 if left out")
    verb.add_argument("--shrink", action="store_true", help="a small random network of the same architecture")
    verb.add_argument("--inject", metavar="FAULT", help="break the last one on purpose, to see that it is caught")
    verb.add_argument("--to", metavar="DIR", help="keep the runs there; else they are kept only where they differ")
    verb.add_argument("--json", action="store_true", help="print the result as JSON")
    verb = verbs.add_parser("replay", help="repeat a step of a run exactly, and show its batch, loss and gradient norm")
    verb.add_argument("run", help="a run directory, such as runs/sample; nothing in it changes")
    verb.add_argument("--step", type=int, required=True, metavar="N", help="counted from 1, as in metrics.jsonl")
    _trust(verb)
    verb = verbs.add_parser("comms", help="measure the bandwidth of collectives between processes")
    verb.add_argument("--processes", type=int, metavar="N", help="on this machine; 2, or those of --config_file")
    verb.add_argument("--config_file", type=launch_file, help="a launch file, for its processes and machines")
    verb.add_argument("--min-bytes", type=int, default=1024)
    verb.add_argument("--max-bytes", type=int, help="16 MiB without a GPU, 1 GiB with one, if left out")
    verb.add_argument("--factor", type=int, default=4, help="from one size to the next; 4 if left out")
    verb.add_argument("--json", metavar="FILE", help="also write the result there")


def _add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan", help="memory, time, traffic and cost of a recipe under every launch file, before it is launched"
    )
    parser.add_argument("--gpu", help="a known GPU, or figures: memory=24,bf16=70,link=32 (this machine's, or an H100)")
    parser.add_argument("--gpus", type=int, metavar="N", help="of a machine (as many as this one has, or 8)")
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
    add_recipe_arguments(parser)


def _add_report_commands(verbs: Any) -> None:
    verb = verbs.add_parser("report", help="write a page of one run, or of several over each other, that opens offline")
    verb.add_argument("run", nargs="+", help="run directories, such as runs/sample; finished or under way")
    verb.add_argument(
        "--to", metavar="FILE", help="the page; RUN/report/report.html, or report-A-B/report.html for several runs"
    )
    verb.add_argument("--price", type=float, metavar="MONEY", help="of a GPU (or a process on CPUs) and hour")
    verb.add_argument("--live", action="store_true", help="serve the page on this machine instead, kept up to date")
    verb.add_argument("--host", help="with --live: the address to serve on, instead of 127.0.0.1")
    verb.add_argument("--port", type=int, help="with --live: the port, instead of one that is free")
    verb = verbs.add_parser("watch", help="watch a run in the terminal: progress, losses, time left, last sample")
    verb.add_argument("run", help="a run directory, here or mounted from another machine")
    verb.add_argument("--once", action="store_true", help="show it once, and end")
    verb = verbs.add_parser("runs", help="list runs: status, step, best validation loss, launch, duration")
    verb.add_argument("directory", nargs="?", default="runs", help="where to look for runs, at any depth (runs)")
    verb.add_argument("--json", action="store_true", help="for programs")


def _launch_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    parser.add_argument(
        "--config_file", required=required, type=launch_file, help="a launch file, by name or path: ddp, my/launch.yaml"
    )
    for option, what in OPTIONS.items():
        parser.add_argument(f"--{option}", help=f"{what}, instead of the launch file's")


def _place(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--step", type=int, help="of a run, the checkpoint's step; the last one if left out")
    verb.add_argument("--base", help="where the base lies now, if not where the run or adapter says")


def _trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that ships with the model, or that the recipe of a run from elsewhere names",
    )

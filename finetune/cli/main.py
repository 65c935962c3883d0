"""The command line: `finetune <verb>`. Verbs of the machine and the shell are here, others in files of their own."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from finetune import __version__
from finetune.cli import arguments, completion, model_verbs, recipe_verbs, run_verbs
from finetune.utils.errors import RecipeError
from finetune.utils.exit_codes import USER_ERROR, run_guarded
from finetune.utils.shipped_files import launch_file

_EXAMPLES = """\
finetune sft --model MODEL --data FILE --lora   fine-tune a model on your data
finetune init my-project                        write a recipe and launch files to edit
finetune train sample                           train a recipe, here one that ships
finetune chat runs/MODEL-FILE                   talk to what was trained
finetune --help                                 all commands; `finetune docs` shows the documentation"""


def main(words: Sequence[str] | None = None) -> int:
    """Runs `finetune <verb> …`, and returns the exit code; without words it shows examples."""
    parser = build_parser()
    completion.answer_shell(parser)
    if not (sys.argv[1:] if words is None else words):
        print(_EXAMPLES, file=sys.stderr)
        return USER_ERROR
    parsed = parse_arguments(parser, words)
    return run_guarded(partial(parsed.run_verb, parsed))


def parse_arguments(parser: argparse.ArgumentParser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line, and keeps it as `typed`; items of a list may follow options, unlike argparse's."""
    parsed, left = parser.parse_known_args(words)
    parsed.typed = [*(sys.argv[1:] if words is None else words)]
    lists = (getattr(parsed, name, None) for name in ("overrides", "words", "run"))
    more = next((given for given in lists if isinstance(given, list)), None)
    if left and (more is None or any(word.startswith("-") for word in left)):
        parser.error(f"unrecognized arguments: {' '.join(left)}")
    if more is not None:
        more += left
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all verbs."""
    parser = completion.PathParser(prog="finetune", description="Fine-tune models on every backend of Accelerate.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in (recipe_verbs, model_verbs, run_verbs):
        module.add_verbs(verbs)

    verb = arguments.add_verb(verbs, comms)
    verb.add_argument("--processes", type=int, metavar="N", help="processes on this machine (default: 2)")
    arguments.add_config_file(verb, "a launch file, which says how many processes and machines there are")
    verb.add_argument("--min-bytes", type=int, default=1024, metavar="N", help="smallest message (default: 1024)")
    verb.add_argument("--max-bytes", type=int, metavar="N", help="largest message (default: 16 MiB, with a GPU 1 GiB)")
    verb.add_argument("--factor", type=int, default=4, metavar="N", help="ratio of one size to the next (default: 4)")
    verb.add_argument("--json", metavar="FILE", help="also write the result to this file")

    verb = arguments.add_verb(verbs, complete, "completion")
    verb.add_argument("shell", choices=("bash", "zsh", "fish"))

    verb = arguments.add_verb(verbs, docs)
    verb.add_argument("topic", nargs="*", metavar="TOPIC", help="a page or words, such as `launch` or `early stopping`")

    arguments.add_verb(verbs, ops)

    verb = arguments.add_verb(verbs, rendezvous)
    verb.add_argument("--port", type=int, default=29500, help="the port to listen on (default: 29500)")
    return parser


def comms(parsed: argparse.Namespace) -> None:
    """Measure the bandwidth of collectives between processes."""
    arguments.prepare_libraries()
    # A process that no launcher has started launches this verb itself.
    if "WORLD_SIZE" not in os.environ:
        from finetune.distributed.launch.launcher import launch_workers

        if parsed.processes is not None and parsed.processes < 2:
            raise RecipeError(f"--processes {parsed.processes}: a collective needs two processes or more.")
        if parsed.json is not None and not Path(parsed.json).absolute().parent.is_dir():
            raise RecipeError(f"--json {parsed.json}: there is no folder {Path(parsed.json).parent}. Create it first.")
        processes = parsed.processes or (2 if parsed.config_file is None else None)
        options = [] if processes is None else ["--num_processes", str(processes)]
        given = {name: getattr(parsed, name.replace("-", "_")) for name in ("min-bytes", "max-bytes", "factor", "json")}
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        launch_workers(parsed.config_file or launch_file("ddp"), options, ["comms", *words], module="finetune")
    from finetune.distributed import measure_bandwidth

    sizes = (parsed.min_bytes, parsed.max_bytes, parsed.factor)
    lines = measure_bandwidth.run_measurement(sizes, Path(parsed.json) if parsed.json else None)
    if lines is not None:
        print("\n".join(lines))


def complete(parsed: argparse.Namespace) -> None:
    """Print a script that completes the command line in a shell."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["finetune"], shell=parsed.shell))


def docs(parsed: argparse.Namespace) -> None:
    """Show a page of the documentation, or find what explains something."""
    from rich.console import Console

    from finetune.cli.docs_pages import show_docs

    show_docs(parsed.topic, Console(highlight=False))


def ops(parsed: argparse.Namespace) -> None:
    """Compile native ops before the first run that needs them."""
    from finetune.distributed.native_ops import build_all

    build_all()


def rendezvous(parsed: argparse.Namespace) -> None:
    """Host the store where the machines of an elastic launch meet, until Ctrl-C."""
    from finetune.distributed.launch.elastic import host_store

    host_store(parsed.port, partial(print, flush=True))

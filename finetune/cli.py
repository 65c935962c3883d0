"""The command line: `finetune <verb>`, and what `scripts/train.py` runs. A verb's modules load when it runs."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from finetune import __version__
from finetune.errors import FinetuneError
from finetune.recipe import dump, json_schema, load

# What a process exits with when the user has to change something.
USER_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """`finetune <verb> …`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="finetune", description="Fine-tuning on every backend of accelerate.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("launch", help="train, as `accelerate launch` does, but check the recipe first")
    verb.add_argument("--config_file", required=True, help="a launch file, such as accelerate_configs/fsdp.yaml")
    verb.add_argument("--num_processes", type=int, help="processes, instead of the launch file's number")
    _recipe_arguments(verb)
    _recipe_arguments(verbs.add_parser("data", help="prepare a recipe's data and print its report"))
    _recipe_arguments(verbs.add_parser("show", help="print the whole recipe, defaults included"))
    verbs.add_parser("schema", help="print the JSON schema of recipes, for editors")
    verbs.add_parser("ops", help="build DeepSpeed's native ops ahead of the first run that needs them")
    parsed = parser.parse_args(arguments)
    return _guarded({"launch": _launch, "data": _data, "show": _show, "schema": _schema, "ops": _ops}[parsed.verb], parsed)


def train_main(arguments: Sequence[str] | None = None) -> int:
    """What each process of `accelerate launch … scripts/train.py` runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/train.py", description="Train as a recipe says.")
    _recipe_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check everything short of data and weights, and stop")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parsed = parser.parse_args(arguments)
    return _guarded(_dry_run if parsed.dry_run else _train, parsed)


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe, such as recipes/sample.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.key=value", help="values instead of the recipe's")


def _guarded(verb: Callable[[argparse.Namespace], None], parsed: argparse.Namespace) -> int:
    """Runs a verb; an error of the user's becomes one paragraph and an exit code."""
    try:
        verb(parsed)
    except FinetuneError as error:
        report(error)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130
    return 0


def report(error: FinetuneError) -> None:
    """Prints an error once a machine if all ranks fail alike, which is so until the process group exists."""
    rank = os.environ.get("RANK")
    started = "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized()
    if started and rank not in (None, "0"):
        print(f"\nError on rank {rank}: {error}", file=sys.stderr, flush=True)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"\nError: {error}", file=sys.stderr, flush=True)


def exit_with(code: int) -> None:
    """Ends the process at once, without the interpreter's teardown.

    After a failure, other ranks may never answer an orderly good-bye. After success everything is closed already,
    and native threads of DeepSpeed that outlive the interpreter would abort the process ("terminate called without
    an active exception") and turn a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(parsed: argparse.Namespace) -> None:
    recipe = load(parsed.recipe, parsed.overrides)
    from finetune import train
    from finetune.quiet import silence_libraries

    silence_libraries()
    run = train.build(recipe, quiet=parsed.quiet)
    train.train(run)
    run.backend.close()


def _dry_run(parsed: argparse.Namespace) -> None:
    recipe = load(parsed.recipe, parsed.overrides)
    from finetune.dryrun import describe

    text = describe(recipe)
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _data(parsed: argparse.Namespace) -> None:
    recipe = load(parsed.recipe, parsed.overrides)
    from finetune.data import prepare

    print("\n".join(prepare(recipe).report.lines()))


def _show(parsed: argparse.Namespace) -> None:
    print(dump(load(parsed.recipe, parsed.overrides)), end="")


def _schema(parsed: argparse.Namespace) -> None:
    print(json.dumps(json_schema(), indent=2))


def _ops(parsed: argparse.Namespace) -> None:
    from finetune.backend.ops import build_all

    build_all()


def _launch(parsed: argparse.Namespace) -> None:
    load(parsed.recipe, parsed.overrides)
    from finetune.launcher import launch

    code = launch(parsed.config_file, parsed.num_processes, [parsed.recipe, *parsed.overrides])
    if code:
        raise SystemExit(code)

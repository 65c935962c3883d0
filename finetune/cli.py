"""The command line: `finetune <verb>`, and what `scripts/train.py` runs. A verb imports what it needs."""

import argparse
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from finetune import __version__, parent
from finetune.artefacts import verbs as verbs_of_artefacts
from finetune.errors import FinetuneError
from finetune.hub import go_offline_if_unreachable
from finetune.recipe import dump, json_schema, load

# What a process exits with when the user has to change something.
USER_ERROR = 2

# What it exits with when it was asked to stop, and all is saved: start the same command again, and it goes on.
# Source: BSD's sysexits.h, EX_TEMPFAIL.
REQUEUE = 75

# How collectives fail on the ranks that are left when one is gone.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "peer is gone")

# How long a rank that fails waits for the others to fail as well.
_PATIENCE_S = 10

# How long one that has lost another waits for its launcher, which looks ten times a second, to see whom.
_LOST_PATIENCE_S = 2.0

# The options of `accelerate launch` that can differ from the launch file, or from machine to machine.
_LAUNCH_OPTIONS = {
    "num_processes": "processes over all machines",
    "machine_rank": "this machine's number, from 0",
    "main_process_ip": "the first machine's address",
    "main_process_port": "a port that is free on it",
    "max_restarts": "how often to start again after a failure",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """`finetune <verb> …`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="finetune", description="Fine-tuning on every backend.")
    parser.add_argument("--version", action="version", version=f"finetune {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser("launch", help="train, as `accelerate launch` does, but check the recipe first")
    verb.add_argument("--config_file", required=True, help="such as accelerate_configs/ddp.yaml")
    for option, what in _LAUNCH_OPTIONS.items():
        verb.add_argument(f"--{option}", help=f"{what}, instead of the launch file's")
    _recipe_arguments(verb)
    verb = verbs.add_parser("data", help="prepare a recipe's data and print its report")
    verb.add_argument("--show", type=int, metavar="N", help="also print N examples as tokens, the learned ones marked")
    _recipe_arguments(verb)
    _recipe_arguments(verbs.add_parser("show", help="print the whole recipe, defaults included"))
    verb = verbs.add_parser("audit", help="prove from a run's ledger that each row of each epoch was used exactly once")
    verb.add_argument("run", help="a run directory, such as runs/sample")
    verb.add_argument("--steps", metavar="A:B", help="also list the rows that steps A to B used, counted from 1")
    verbs_of_artefacts.add(verbs)
    verbs.add_parser("schema", help="print the JSON schema of recipes, for editors")
    verbs.add_parser("ops", help="build native ops ahead of the first run that needs them")
    parsed = parser.parse_args(arguments)
    run = {"launch": _launch, "data": _data, "show": _show, "audit": _audit, "schema": _schema, "ops": _ops}
    for name in ("export", "generate", "evaluate"):
        run["eval" if name == "evaluate" else name] = _artefacts(getattr(verbs_of_artefacts, name))
    return _guarded(run[parsed.verb], parsed)


def train_main(arguments: Sequence[str] | None = None) -> int:
    """What each process of `accelerate launch … scripts/train.py` runs; returns the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/train.py", description="Train as a recipe says.")
    _recipe_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="check all but data and weights, and stop")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parsed = parser.parse_intermixed_args(arguments)
    return _guarded(_dry_run if parsed.dry_run else _train, parsed)


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe, such as recipes/sample.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key.key=value", help="instead of the recipe's values")


def _guarded(verb: Callable[[argparse.Namespace], int | None], parsed: argparse.Namespace) -> int:
    """Runs a verb; an error of the user's becomes one paragraph and an exit code."""
    try:
        return verb(parsed) or 0
    except FinetuneError as error:
        report(error)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read the output (`| head`) has seen enough. Nothing is left to flush at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def report(error: FinetuneError) -> None:
    """Prints an error as one paragraph, once a machine where ranks say the same."""
    text = " ".join(str(error).split())
    if _first_to_say(text):
        print(f"\nError: {text}", file=sys.stderr, flush=True)


def _first_to_say(text: str) -> bool:
    """Whether no other rank on this machine has said this.

    A launcher ends every rank as soon as one has ended, so none may wait for another to speak. torchrun and
    Accelerate give each rank a file in a folder that they share; the first to make a file there speaks.
    """
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if given:
        said = Path(given).parent.parent / f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            said.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # then rather twice than not at all
        return True
    # Started otherwise. Ranks fail alike until the process group exists.
    return _group_exists() or os.environ.get("LOCAL_RANK", "0") == "0"


def exit_with(code: int) -> None:
    """Ends the process at once, without the interpreter's teardown.

    After a failure, other ranks may never answer an orderly good-bye. After success everything is closed
    already, and a backend's native threads that outlive the interpreter would abort the process ("terminate
    called without an active exception") and turn a finished run into a failed one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code == USER_ERROR and _group_exists():
        _wait_for_others()
    os._exit(code)


def _group_exists() -> bool:
    """Whether this process has met the other ranks."""
    return "torch.distributed" in sys.modules and bool(sys.modules["torch.distributed"].is_initialized())


def _wait_for_others() -> None:
    """Lets ranks that fail alike get that far: one still connecting would say at length that its peer is gone."""
    distributed = sys.modules["torch.distributed"]
    own, ranks = distributed.get_rank(), range(distributed.get_world_size())
    try:
        store = distributed.distributed_c10d._get_default_store()
        store.set(f"finetune/failed/{own}", "1")
        store.wait([f"finetune/failed/{rank}" for rank in ranks], timedelta(seconds=_PATIENCE_S))
        store.set(f"finetune/left/{own}", "1")
        if own == 0:  # which may hold the store, and so must leave last
            store.wait([f"finetune/left/{rank}" for rank in ranks], timedelta(seconds=_PATIENCE_S))
    except Exception:  # not all fail, or one has left already: nothing more to wait for
        return


def _train(parsed: argparse.Namespace) -> int:
    recipe = load(parsed.recipe, parsed.overrides)
    go_offline_if_unreachable()
    from finetune.guard import explain_memory
    from finetune.quiet import silence_libraries
    from finetune.run import build
    from finetune.train import train

    silence_libraries()
    try:
        with parent.needed(128 + signal.SIGTERM):
            run = build(recipe, quiet=parsed.quiet)
        with run.stopper.listening():
            results = train(run)
            run.backend.close()
            # Requests to stop reach the ranks one after the other: the last ones find all saved.
            run.stopper.ignore()
    except FinetuneError:
        raise
    except Exception as error:
        if (explained := explain_memory(error)) is not None:
            raise explained from error
        return _say_failure(error)
    if "stopped" in results:
        _tell_launcher()
        return REQUEUE
    return 0


def _say_failure(error: Exception) -> int:
    """Prints what nobody foresaw, on the rank that it happened on; the others only say that they lost one.

    They wait before they do: then the launcher sees first which one it was, says so, and ends the rest.
    """
    rank = os.environ.get("RANK", "0")
    if _group_exists() and any(sign in str(error) for sign in _LOST_PEER):
        time.sleep(_LOST_PATIENCE_S)
        reason = " ".join(str(error).split())[:200]
        print(f"\nRank {rank} ends, because another rank is gone: {reason}", file=sys.stderr, flush=True)
        return 1
    print(f"\nRank {rank} failed:", file=sys.stderr)
    traceback.print_exception(error)
    sys.stderr.flush()
    return 1


def _tell_launcher() -> None:
    """Lets `finetune launch` know, which cannot see the exit code if it was itself told to stop."""
    marker = os.environ.get("FINETUNE_STOPPED_FILE")
    if marker:
        Path(marker).touch()


def _dry_run(parsed: argparse.Namespace) -> None:
    recipe = load(parsed.recipe, parsed.overrides)
    go_offline_if_unreachable()
    from finetune.dryrun import describe

    text = describe(recipe)
    if os.environ.get("RANK", "0") == "0":
        print(text)


def _data(parsed: argparse.Namespace) -> None:
    recipe = load(parsed.recipe, parsed.overrides)
    go_offline_if_unreachable()
    from finetune.data import prepare

    prepared = prepare(recipe)
    print("\n".join(prepared.report.lines()))
    if parsed.show:
        from rich.console import Console

        from finetune.data.show import examples

        console = Console(soft_wrap=True, highlight=False)
        for line in examples(prepared, parsed.show, coloured=console.is_terminal and not console.no_color):
            console.print(line)


def _show(parsed: argparse.Namespace) -> None:
    print(dump(load(parsed.recipe, parsed.overrides)), end="")


def _audit(parsed: argparse.Namespace) -> int:
    from finetune import ledger

    directory = Path(parsed.run)
    first, last = ledger.span(parsed.steps) if parsed.steps else (0, -1)
    found = ledger.audit(directory)
    for line in found.lines():
        print(line)
    for entry in ledger.used(directory):
        if first <= entry.step + 1 <= last:
            print(f"step {entry.step + 1}: position {entry.position}, rows {' '.join(map(str, entry.rows.tolist()))}")
    return 0 if found.holds else 1


def _artefacts(verb: Callable[[argparse.Namespace, Callable[[str], None]], None]) -> Callable[..., None]:
    def run(parsed: argparse.Namespace) -> None:
        go_offline_if_unreachable()
        from finetune.quiet import silence_libraries

        silence_libraries()
        verb(parsed, lambda text: print(text, end="", flush=True))

    return run


def _schema(parsed: argparse.Namespace) -> None:
    print(json.dumps(json_schema(), indent=2))


def _ops(parsed: argparse.Namespace) -> None:
    from finetune.backend.ops import build_all

    build_all()


def _launch(parsed: argparse.Namespace) -> None:
    recipe = load(parsed.recipe, parsed.overrides)
    from finetune.launcher import launch

    options: list[str] = []
    for option in _LAUNCH_OPTIONS:
        if (value := getattr(parsed, option)) is not None:
            options += [f"--{option}", value]
    launch(parsed.config_file, options, [parsed.recipe, *parsed.overrides], grace_s=recipe.guard.grace_s)

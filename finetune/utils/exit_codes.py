"""How a process ends: one paragraph, an exit code, once a machine, without the interpreter's teardown."""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from finetune.utils import orphan_watch, signals
from finetune.utils.errors import FinetuneError

# What a process exits with when the user has to change something.
USER_ERROR = 2

# What it exits with when it was asked to stop, and all is saved: start the same command again, and it resumes.
# Source: BSD's sysexits.h, EX_TEMPFAIL.
REQUEUE = 75

# To whoever uses another launcher, whose traceback and exit code no worker can help.
_HINT = "`finetune launch` takes the same launch file and recipe, and ends with the error and exit code 2 alone."

# How collectives fail on the ranks that are left when one is gone.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "peer is gone")

# How long a rank that fails waits for the others to fail as well.
_PATIENCE_S = 10

# How long one that has lost another waits for its launcher, which looks ten times a second, to see whom.
_LOST_PATIENCE_S = 2.0


def guarded(verb: Callable[[], int | None]) -> int:
    """Runs a verb; an error of the user's, or a signal that asks to end, becomes one paragraph and an exit code."""
    try:
        with signals.handled(signals.stop_signals(), signals.interrupter()):
            try:
                return verb() or 0
            except FinetuneError as error:
                print_error(error)
                return USER_ERROR
            except KeyboardInterrupt as error:
                return signals.say_interrupted(error)
            except BrokenPipeError:
                # Whoever read the output (`| head`) has seen enough. Nothing is left to flush at exit either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
    except KeyboardInterrupt as error:  # it came before signals were handled, and was held back until then
        return signals.say_interrupted(error)


def print_error(error: FinetuneError) -> None:
    """Prints an error as one paragraph, or a line a problem; once a machine where ranks say the same."""
    text = "\n".join(line.rstrip() for line in error.lines) or " ".join(str(error).split())
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    others = orphan_watch.is_launcher() and not orphan_watch.is_own_launcher()
    if given and others:
        # What the launcher prints last, behind a traceback of its own.
        written = {"message": f"said above, before this traceback of the launcher's. {_HINT}", "timestamp": time.time()}
        with suppress(OSError):
            Path(given).write_text(json.dumps(written), encoding="utf-8")
    if _first_to_say(text):
        print(f"\nError: {text}", file=sys.stderr, flush=True)
        if others and not given:
            print(f"What follows is a traceback of the launcher's. {_HINT}", file=sys.stderr, flush=True)


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
        # Only here: most commands end without torch.
        from finetune.utils.compat.torch_private import default_store

        store = default_store()
        store.set(f"finetune/failed/{own}", "1")
        store.wait([f"finetune/failed/{rank}" for rank in ranks], timedelta(seconds=_PATIENCE_S))
        store.set(f"finetune/left/{own}", "1")
        if own == 0:  # which may hold the store, and so must leave last
            store.wait([f"finetune/left/{rank}" for rank in ranks], timedelta(seconds=_PATIENCE_S))
    except Exception:  # not all fail, or one has left already: nothing more to wait for
        return


def say_failure(error: Exception) -> int:
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

"""Ends of processes: one paragraph for each machine, and an exit code, without the interpreter's teardown."""

import errno
import hashlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from finetune.utils import orphan_watch, signals
from finetune.utils.errors import FinetuneError
from finetune.utils.quoting import to_stderr

# Something failed; a restart may mend it.
FAILED = 1

# The user has to change something.
USER_ERROR = 2

# The process was asked to stop, and all is saved: the same command resumes it.
# Source: BSD's sysexits.h, EX_TEMPFAIL.
REQUEUE = 75

# A worker of a launch on several machines has lost another one; which, the launchers find out.
# Source: BSD's sysexits.h, EX_UNAVAILABLE.
LOST_RANK = 69

ALERTED = "FINETUNE_ALERTED"
"""Variable in which a launcher names a file that rank 0 writes once it has sent an alert of how the run ended."""

# For users of another launcher, whose traceback and exit code no worker can change.
_HINT = "`finetune launch` takes the same launch file and recipe, and ends with the error and exit code 2 only."

# By which a launcher, mpirun, srun or Intel's mpirun tells a process its number on this machine.
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "MPI_LOCALRANKID")


class LostRankError(RuntimeError):
    """Another rank has failed, and has said so."""


# Errors of collectives on the other ranks when one is gone.
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "peer is gone")

# A rank that fails waits so long for the others to fail as well.
_PATIENCE_S = 10

# A rank that has lost another waits so long for its launcher, which polls ten times a second, to see which.
_LOST_PATIENCE_S = 2.0


def run_guarded(verb: Callable[[], int | None]) -> int:
    """Runs a verb; turns an error of the user, or a signal that asks to end, into one paragraph and an exit code."""
    try:
        with signals.handle_signals(signals.stop_signals(), signals.interrupter()):
            try:
                return verb() or 0
            except FinetuneError as error:
                print_error(error)
                return USER_ERROR
            except KeyboardInterrupt as error:
                # A launcher ends the other ranks of one that has failed, which has said why.
                return signals.say_interrupted(error, quiet=_failure_is_said())
            except BrokenPipeError:
                # Whoever read the output (`| head`) has seen enough. Nothing is left to flush at exit either.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 0
            except Exception as error:
                if (explained := _explain_open_files(error)) is None:
                    raise
                print_error(explained)
                return USER_ERROR
    except KeyboardInterrupt as error:  # it came before signals were handled, and was held back until then
        return signals.say_interrupted(error)


def print_error(error: FinetuneError) -> None:
    """Prints an error as one paragraph, or a line for each problem; once for each machine if its ranks agree."""
    error = _explain_open_files(error) or error
    text = "\n".join(line.rstrip() for line in error.lines) or " ".join(str(error).split())
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    others = orphan_watch.is_launcher() and not orphan_watch.is_own_launcher()
    if given and others:
        # The launcher prints it last, after its own traceback.
        written = {"message": f"printed above, before the launcher's traceback. {_HINT}", "timestamp": time.time()}
        with suppress(OSError):
            Path(given).write_text(json.dumps(written), encoding="utf-8")
    if _first_to_say(text):
        to_stderr(f"\nError: {text}")
        if others and not given:
            print(f"The traceback that follows is of the launcher. {_HINT}", file=sys.stderr, flush=True)


def _first_to_say(text: str) -> bool:
    """Tells if no other rank on this machine has printed this text.

    A launcher ends every rank as soon as one has ended, so none may wait for another to speak. torchrun and
    Accelerate give each rank a file in a folder that they share; the first to make a file there speaks.
    """
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if given:
        marker = Path(given).parent.parent / f"said-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            pass  # then rather twice than not at all
        return True
    # Started otherwise. Ranks fail alike until the process group exists.
    return _group_exists() or next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0"


def _failure_is_said() -> bool:
    """Tells if a rank on this machine has printed an error."""
    given = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return given is not None and any(Path(given).parent.parent.glob("said-*"))


def _explain_open_files(error: BaseException | None) -> FinetuneError | None:
    """Returns what to do about an error that comes of the limit of open files; None for any other."""
    text = os.strerror(errno.EMFILE)
    while error is not None and getattr(error, "errno", 0) != errno.EMFILE and text not in str(error):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return FinetuneError(
        f"{text}: a process here may have {most:,} open at a time, and this one needs more. Raise the limit "
        "(`ulimit -n 4096`) and start the same command again."
    )


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
    """Tells if this process is connected to the other ranks."""
    return "torch.distributed" in sys.modules and bool(sys.modules["torch.distributed"].is_initialized())


def _wait_for_others() -> None:
    """Waits for ranks that fail alike: one that is still connecting would report at length that its peer is gone."""
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


def lost_peer(error: Exception) -> bool:
    """Tells if an error is that of a collective whose other rank is gone, or says that it is."""
    return isinstance(error, LostRankError) or (_group_exists() and any(sign in str(error) for sign in _LOST_PEER))


def say_failure(error: Exception) -> int:
    """Prints an unexpected error on the rank that raised it; the others only report that they lost a rank.

    They wait before they do, so that the launcher sees first which rank it was, reports it, and ends the rest.
    """
    rank = os.environ.get("RANK", "0")
    if (explained := _explain_open_files(error)) is not None:
        print_error(explained)
        return USER_ERROR
    if lost_peer(error):
        time.sleep(_LOST_PATIENCE_S)
        reason = " ".join(str(error).split())[:200]
        to_stderr(f"\nRank {rank} ends, because another rank is gone: {reason}")
        return LOST_RANK if orphan_watch.on_several_machines() else 1
    to_stderr(f"\nRank {rank} failed:\n{''.join(traceback.format_exception(error)).rstrip()}")
    return 1


def how_ended(code: int) -> str:
    """Returns how a process has ended, by the exit code that Python gives it: negative for a signal."""
    kernel = " (so does the kernel when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{kernel}" if code < 0 else f"ended with exit code {code}"


def shell_code(code: int) -> int:
    """Returns the exit code that a shell has for such a process."""
    return 128 - code if code < 0 else code

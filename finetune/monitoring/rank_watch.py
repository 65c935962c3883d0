"""Watches where ranks stand: names the rank that others wait for, and ends a run in which none gets on.

Each rank tells the others, in the store of the launch, at which step and phase it is, from before the process group
starts until the last rank is done. A thread does it, because the main thread may wait in a collective for ever. What a
rank does itself is told apart from what it waits for: time in `data` is its own, and on a CPU so is the time in which
its main thread runs or would run if a core were free.
"""

import faulthandler
import itertools
import os
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Self

import torch

from finetune.config.recipe_schema import GuardSection
from finetune.distributed.rank_notes import RankNotes
from finetune.distributed.rendezvous_names import rank_name
from finetune.monitoring.alerts import send_alert
from finetune.monitoring.rank_progress import (
    CALLER,
    OUTSIDE,
    RANKS,
    START,
    OwnWork,
    Position,
    Straggler,
    find_straggler,
    stall_text,
    straggler_line,
)
from finetune.utils.atomic_files import write_json
from finetune.utils.bounded_work import ends_within
from finetune.utils.compat import torch_private
from finetune.utils.errors import FinetuneError
from finetune.utils.exit_codes import FAILED, USER_ERROR, print_error, say_failure
from finetune.utils.quoting import to_stderr

STALLS = "stalls"
"""Folder of a run directory with the stacks of ranks that came no further."""

_TICK_S = 1.0
# A stall is so many times what a step usually takes, and outside of steps and in the first, where a save, or what is
# loaded or compiled, may take long, so many times that.
_USUAL, _OUTSIDE = 10, 6
# Who asks a run to stop by Ctrl-C waits so long at least for a rank that comes no further.
_HUNG_S = 10.0
# A rank has so long to fail as another one did.
_ALIKE_S = 5.0
# Ranks are compared over so many seconds and steps at least; one that is behind twice in a row is named.
_COMPARED_S, _COMPARED_STEPS = 5.0, 5
# So long one that leads waits for what others have to say, and others for what it makes of that.
_ANSWER_S = 10.0
# What waits for others, or does as it is told: of no interest in a stack.
_LIBRARIES = (os.path.dirname(threading.__file__), os.sep + "site-packages" + os.sep)

_numbers = itertools.count()


class RankWatch:
    """Thread that tells other ranks where this one is, and compares all of them on rank 0.

    Entered again while it runs, it goes on, and ends with the outermost block.
    """

    def __init__(self, guard: GuardSection, directory: Path, *, rank: int, world_size: int) -> None:
        self._guard, self._directory = guard, directory
        self._rank, self._world_size = rank, world_size
        # The host's thread spins while it waits for a GPU.
        self._knows_busy = not torch.cuda.is_available()
        self._name = f"watch-{next(_numbers)}"
        self._place = rank_name(self._rank)
        now = time.monotonic()
        self._at = (0, CALLER, 0, now)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._work, self._first_step = OwnWork(0, 0.0, 0.0, 0.0), 0
        self._busy_s, self._running_since = 0.0, 0.0
        self._step_ends: deque[float] = deque(maxlen=32)
        self._main = threading.current_thread()
        self._over, self._ending = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._looked = now
        self._compared: list[OwnWork] | None = None
        self._suspect: int | None = None
        self._named: Straggler | None = None

    def __enter__(self) -> Self:
        self._main = threading.current_thread()
        if self._thread is not None:
            return self
        self._running_since = self._own_seconds()
        self.mark(START)
        if self._rank == 0:
            with suppress(OSError):  # of a start before
                (self._directory / RANKS).unlink(missing_ok=True)
        self._thread = threading.Thread(target=self._run, name="rank watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.give_way()
        self._over.set()
        if self._thread is not None:
            self._thread.join(2 * _TICK_S)
        faulthandler.cancel_dump_traceback_later()

    def give_way(self) -> None:
        """Waits while this watch ends the process: that a collective of the main thread fails then is its doing."""
        if self._ending.is_set() and self._thread is not None:
            self._thread.join()

    def begin(self, step: int) -> None:
        """Notes how many steps were taken before, and that the caller of the run may take his time until the next."""
        self.mark(CALLER)
        self._at, self._first_step = (step, *self._at[1:]), step

    def mark(self, phase: str) -> None:
        """Notes that a phase begins, or that one goes on; costs a microsecond."""
        step, before, marks, since = self._at
        now = time.monotonic()
        self._seconds[before] += now - since
        if (phase in OUTSIDE) != (before in OUTSIDE):
            running = self._own_seconds()
            if before not in OUTSIDE:
                self._busy_s += running - self._running_since
            self._running_since = running
        # One that goes on may do so more often on one rank than on another.
        self._at = step, phase, marks + (phase != before), now

    def step_taken(self, step: int) -> None:
        """Notes that a step is done."""
        _, phase, marks, since = self._at
        self._at = step, phase, marks, since
        now, running = time.monotonic(), self._own_seconds()
        self._step_ends.append(now)
        self._busy_s, self._running_since = self._busy_s + running - self._running_since, running
        outside = sum(self._seconds[phase] for phase in OUTSIDE)
        inside = sum(self._seconds.values()) + now - since - outside
        self._work = OwnWork(step - self._first_step, inside, self._seconds["data"], self._busy_s)

    def _own_seconds(self) -> float:
        """Returns how long this thread has run, or waited for a free core."""
        if not self._knows_busy:
            return 0.0
        try:
            # Source: the kernel's Documentation/scheduler/sched-stats.rst.
            with open("/proc/thread-self/schedstat", encoding="ascii") as file:
                return sum(int(number) for number in file.read().split()[:2]) / 1e9
        except (OSError, ValueError):
            return time.thread_time()

    def _position(self, *, fully: bool = False) -> Position:
        """Returns where this rank is; `fully` with its line of code and its last collective."""
        step, phase, marks, since = self._at
        details = (0, "", "")
        if fully:
            details = (*torch_private.last_collective(), _line_of(self._main))
        return Position(self._place, step, phase, marks, time.monotonic() - since, *details)

    def stands_still(self) -> str | None:
        """Returns where this rank is if it has come no further for longer than Ctrl-C waits for it; else None.

        What it evaluates or saves may take its time.
        """
        at = self._position(fully=True)
        return str(at) if at.phase not in OUTSIDE and at.for_s > max(_HUNG_S, _USUAL * self._usual_s()) else None

    def _run(self) -> None:
        try:
            notes = RankNotes(self._rank, self._world_size)
            self._tick(notes)
            while not self._over.wait(_TICK_S):
                self._tick(notes)
        except RuntimeError:
            # The store is gone when rank 0 ends, or its machine is lost: the launcher sees to that, if it can.
            while not self._over.wait(_TICK_S):
                if self._is_over_limit():
                    self._end(None, self._rank, self._directory / _stall_folder())

    def _is_over_limit(self) -> bool:
        """Tells if this rank has come no further for too long; called now and then."""
        limit_s = self._limit_s()
        if limit_s is None:
            faulthandler.cancel_dump_traceback_later()
            return False
        # By the interpreter, for a main thread that keeps Python's lock; put off as long as this thread runs. Others
        # may have more to say before that.
        faulthandler.dump_traceback_later(limit_s + 4 * _ANSWER_S, exit=True, file=sys.__stderr__ or 2)
        return self._position().for_s > limit_s

    def _tick(self, notes: RankNotes) -> None:
        notes.write(f"{self._name}/at/{self._rank}", asdict(self._position()) | {"work": asdict(self._work)})
        key, over = f"{self._name}/stall", self._is_over_limit()
        stall = notes.read([key]).get(key)
        if stall is None and over:
            stall = notes.write_first(key, {"rank": self._rank, "folder": _stall_folder()})
        if (failure := notes.read_failure()) is not None and not self._over.wait(_ALIKE_S):
            self._end_with(failure)
        if stall is not None and not self._over.is_set():
            self._end(notes, stall["rank"], self._directory / stall["folder"])
        if self._rank == 0 and self._world_size > 1:
            self._look_at_ranks(notes)

    def _limit_s(self) -> float | None:
        """Returns how long a rank may stay in its phase; None for ever."""
        phase = self._at[1]
        if self._guard.stall_s is None or phase == CALLER:
            return None
        limit_s = max(self._guard.stall_s, _USUAL * self._usual_s())
        return limit_s * _OUTSIDE if phase in OUTSIDE or not self._step_ends else limit_s

    def _usual_s(self) -> float:
        """Returns what a step usually takes; 0 before there are two."""
        ends = list(self._step_ends)
        return median(later - earlier for earlier, later in itertools.pairwise(ends)) if len(ends) > 1 else 0.0

    def _look_at_ranks(self, notes: RankNotes) -> None:
        """Writes where all ranks are, and compares their work since they were compared last."""
        now = time.monotonic()
        if now - self._looked < _COMPARED_S:
            return
        self._looked = now
        positions = notes.read([f"{self._name}/at/{rank}" for rank in range(self._world_size)])
        if len(positions) < self._world_size:
            return
        ranks, works = list(positions.values()), [OwnWork(**at["work"]) for at in positions.values()]
        steps = [work.since(before) for work, before in zip(works, self._compared or works, strict=True)]
        if self._compared is None or min(step.steps for step in steps) >= _COMPARED_STEPS:
            if self._compared is not None and self._guard.straggler is not None:
                self._judge(find_straggler(steps, self._guard.straggler), ranks)
            self._compared = works
        shown = [{key: at[key] for key in ("place", "step", "phase", "marks", "for_s")} for at in ranks]
        behind = None if self._named is None else straggler_line(self._named, ranks[self._named.rank]["place"])
        with suppress(OSError):
            write_json(self._directory / RANKS, {"time": round(time.time(), 3), "ranks": shown, "behind": behind})

    def _judge(self, straggler: Straggler | None, ranks: Sequence[dict[str, Any]]) -> None:
        """Names a rank that was behind twice in a row, once."""
        suspect = None if straggler is None else straggler.rank
        before, self._suspect = self._suspect, suspect
        named = None if self._named is None else self._named.rank
        if straggler is not None and suspect == before:
            self._named = straggler
            if suspect != named:
                text = straggler_line(straggler, ranks[straggler.rank]["place"])
                to_stderr(f"after step {ranks[straggler.rank]['step']}: {text}")
                send_alert(self._guard, "straggler", text, self._facts())
        elif suspect is None and before is None and self._named is not None:
            to_stderr(f"after step {ranks[0]['step']}: {ranks[self._named.rank]['place']} is no longer behind")
            self._named = None

    def _end_with(self, failure: Exception) -> None:
        """Ends the process for another rank's error, whatever it waits for."""
        if isinstance(failure, FinetuneError):
            ends_within(_ANSWER_S, lambda: print_error(failure))
            os._exit(USER_ERROR)
        os._exit(say_failure(failure))

    def _end(self, notes: RankNotes | None, leader: int, folder: Path) -> None:
        """Ends the process, once all ranks have written down what they are at, and one has said why."""
        self._ending.set()
        faulthandler.cancel_dump_traceback_later()
        try:
            self._say_farewell(notes, leader, folder)
        except Exception:  # The end comes in any case.
            traceback.print_exc()
        os._exit(FAILED)

    def _say_farewell(self, notes: RankNotes | None, leader: int, folder: Path) -> None:
        at = self._position(fully=True)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self._rank}.txt").open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            (folder / f"rank-{self._rank}.collectives.json").write_bytes(torch_private.recorded_collectives())
        text = (
            f"{at.place} has come no further for {at.for_s:.0f} s, and the store that ranks share is gone. It is {at}. "
            f"Its Python stacks are in {folder}."
        )
        if notes is None:
            ends_within(_ANSWER_S, lambda: print_error(FinetuneError(text)))
            return
        speaker = leader
        with suppress(RuntimeError):
            notes.write(f"{self._name}/stalled/{self._rank}", asdict(at))
            key = f"{self._name}/verdict"
            if self._rank == leader:
                notes.write(key, self._verdict(notes, folder))
            if (verdict := _wait_for(notes, [key], 3 * _ANSWER_S).get(key)) is not None:
                text, speaker = verdict
        ends_within(_ANSWER_S, lambda: print_error(FinetuneError(text)))
        if self._rank == speaker:
            send_alert(self._guard, "stalled", text, self._facts(), wait=True)
        with suppress(RuntimeError):
            if self._rank != speaker:  # whose collective fails once another rank is gone
                _wait_for(notes, [f"{self._name}/left/{speaker}"], _ANSWER_S)
            notes.write(f"{self._name}/left/{self._rank}", True)
            if self._rank == 0:  # which may host the store
                _wait_for(notes, [f"{self._name}/left/{rank}" for rank in range(self._world_size)], _ANSWER_S)

    def _facts(self) -> dict[str, Any]:
        return {"run": str(self._directory), "step": self._at[0]}

    def _verdict(self, notes: RankNotes, folder: Path) -> tuple[str, int]:
        """Returns the paragraph that names the rank that is behind, and the first rank that can still send alerts."""
        keys = {f"{self._name}/stalled/{rank}": rank for rank in range(self._world_size)}
        answers = {keys[key]: Position(**at) for key, at in _wait_for(notes, list(keys), _ANSWER_S).items()}
        silent = {}
        for rank in set(range(self._world_size)) - set(answers):
            key = f"{self._name}/at/{rank}"
            at = notes.read([key]).get(key, {})
            last = Position(**{name: at[name] for name in at if name != "work"}) if at else None
            silent[f"rank {rank}" if last is None else last.place] = last
        return stall_text(list(answers.values()), silent, self._usual_s(), folder), min(answers)


def _stall_folder() -> str:
    return f"{STALLS}/{time.strftime('%Y%m%d-%H%M%S')}"


def _line_of(thread: threading.Thread) -> str:
    """Returns the innermost line that a thread is at in code that is no library's, or in any."""
    frame = innermost = sys._current_frames().get(thread.ident or 0)
    while frame is not None and any(library in frame.f_code.co_filename for library in _LIBRARIES):
        frame = frame.f_back
    chosen = frame or innermost
    return "" if chosen is None else f"{chosen.f_code.co_filename}:{chosen.f_lineno} ({chosen.f_code.co_name})"


def _wait_for(notes: RankNotes, names: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Returns those of some notes that come within a time."""
    end = time.monotonic() + limit_s
    while len(received := notes.read(names)) < len(names) and time.monotonic() < end:
        time.sleep(0.1)
    return received

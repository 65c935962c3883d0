"""Heartbeats of the launchers of several machines while their workers run.

Each launcher counts in the store that machine 0 hosts, and times by its own clock when another's count last changed. A
machine that stands still, one that cannot reach the store any more, or a worker that has failed ends the launch on all
machines, with one paragraph on each. A thread counts, and another one watches it, since calls of the store hang on a
link that is cut.

Workers are killed: they wait in a collective for ranks that are gone, and what they would save needs all ranks. The
last checkpoint is whole.
"""

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from finetune.distributed.launch.machine_facts import capital
from finetune.distributed.launch.rendezvous import Rendezvous
from finetune.utils.exit_codes import LOST_RANK, REQUEUE, USER_ERROR, how_ended, shell_code

_COUNT_S, _WATCH_S = 1.0, 0.25
# A thread that wakes so late stood still itself, and could hear nobody.
_STILL_S = 2.0
# Once workers have lost others, a machine that stands still for so long is the reason.
_SUSPECT_S = 6.0
# Workers that fail over one error of the user do so within this time, and each machine says it; others have the time
# to print what they fail over.
_ALIKE_S, _WORDS_S = 5.0, 1.0
# So long the main thread has to end when the workers are gone; then the process is ended.
_END_S = 5.0
_LEFT = "left"
_LAST = " All workers of all machines end; the same command on every machine resumes from the last checkpoint."


@dataclass(frozen=True)
class _Ending:
    """Why a launch ends on all machines."""

    text: str
    code: int
    lost: tuple[int, ...] = ()
    """Machines that are gone."""
    after: float = 0.0
    """Time by the monotonic clock before which workers may still end by themselves."""


class Heartbeat:
    """Tells other machines that this one lives, and ends this one's workers if another's do."""

    def __init__(self, met: Rendezvous) -> None:
        self._store, self._own = met.store, met.plan.facts.rank
        self._machines, self._timeout_s = met.machines, met.plan.heartbeat_timeout_s
        now = time.monotonic()
        self._counts = {facts.rank: (b"", now) for facts in met.machines if facts.rank != self._own}
        self._left: set[int] = set()
        """Machines that have ended, or were given up."""
        self._reached = self._awake = now
        self._ending: _Ending | None = None
        self._one_ending = threading.Lock()
        self._told: _Ending | None = None
        """The reason that this machine tells the others."""
        self._word = ""
        """Stands in place of its count at last, and says how it has left."""
        self._wake, self._over, self._said_word = threading.Event(), threading.Event(), threading.Event()
        self._lost_ranks = self._printed = False

    def start(self) -> None:
        """Starts to count and to watch."""
        for work, name in ((self._count, "heartbeat"), (self._watch, "watch")):
            threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def has_ended_workers(self) -> bool:
        """True if there is a reason why workers were ended, which is said."""
        return self._ending is not None

    @property
    def alert(self) -> str | None:
        """Why the launch ends, for machine 0 to tell, and for machine 1 if that one is gone; else None."""
        first = 0 if self._ending is None or 0 not in self._ending.lost else 1
        return self._ending.text if self._ending is not None and self._own == first else None

    def workers_ended(self, codes: Sequence[int | None]) -> None:
        """Ends the launch on all machines at once if one of this machine's workers has failed.

        `codes` are their exit codes, in the order of their ranks; None for one that runs.
        """
        failed = [(rank, code) for rank, code in enumerate(codes) if code and code not in (REQUEUE, LOST_RANK)]
        if not failed:
            self._lost_ranks |= LOST_RANK in codes
            return
        local, code = failed[0]
        who = f"The worker of rank {self._own * len(codes) + local} on {self._machines[self._own].place}"
        self._tell(_Ending(f"{who} {how_ended(code)}; its output there says more.{_LAST}", shell_code(code)))

    def finish(self, code: int) -> int:
        """Ends the heartbeats of a launch whose workers have ended; returns the exit code of this launcher.

        Waits for the reason if workers have lost others, and on machine 0, which hosts the store, for other machines.
        """
        self._lost_ranks |= code == LOST_RANK
        here = self._machines[self._own].place
        if self._lost_ranks:
            self._wait(self._timeout_s, lambda: self._ending is not None or self._left == set(self._counts))
        if self._ending is None and self._lost_ranks:
            text = f"Ranks on {here} have lost others, and no machine says why: connections between them broke."
            self._tell(_Ending(f"{text}{_LAST}", 1))
        elif self._ending is None and code not in (0, REQUEUE):
            self._tell(_Ending(f"The launcher of {here} ended with exit code {code}.{_LAST}", code))
        self._print_news(code)
        self._word = f"{_LEFT} {code}"
        self._wake.set()
        self._said_word.wait(2 * _COUNT_S)
        if self._own == 0:
            # Others learn from the store how this ended, until all have left, or after a failure no longer count.
            before = self._ending
            limit, still_s = (self._timeout_s, math.inf) if before is None else (_END_S, 3 * _COUNT_S)
            self._wait(
                limit,
                lambda: (
                    self._ending is not before
                    or all(n in self._left or time.monotonic() - at > still_s for n, (_, at) in self._counts.items())
                ),
            )
            self._print_news(code)
        self._over.set()
        return code if self._ending is None else self._ending.code

    def _wait(self, limit_s: float, done: Callable[[], bool]) -> None:
        until = time.monotonic() + limit_s
        while not done() and time.monotonic() < until:
            time.sleep(_WATCH_S)

    def _tell(self, ending: _Ending) -> None:
        """Takes up an ending that this machine has found, and tells the others."""
        if self._take_up(ending):
            self._told = ending
        self._wake.set()

    def _take_up(self, ending: _Ending) -> bool:
        """Makes an ending this machine's unless it has one; workers get the time to say what they fail over."""
        with self._one_ending:
            if self._ending is not None:
                return False
            wait_s = _ALIKE_S if ending.code == USER_ERROR else _WORDS_S
            self._ending = replace(ending, after=time.monotonic() + wait_s)
            return True

    def _print_news(self, code: int) -> None:
        """Prints why workers of all machines ended, unless this machine's have failed alike, and said why."""
        if self._ending is not None and not code == self._ending.code == USER_ERROR:
            self._print(self._ending)

    def _print(self, ending: _Ending) -> None:
        if not self._printed:
            self._printed = True
            # Not print: the main thread may be in the middle of one, and the terminal gone.
            with suppress(OSError):
                os.write(sys.stderr.fileno(), f"\nError: {ending.text}\n".encode())

    def _count(self) -> None:
        number, ranks, reported = 0, list(self._counts), False
        while not self._over.is_set():
            number += 1
            try:
                # The reason comes before the word: who sees that a machine has left can see why.
                word = self._word
                if self._told is not None and not reported:
                    # The first reason is right: what comes later follows from it.
                    self._store.compare_set("ending", "", json.dumps([self._told.text, self._told.code]))
                    reported = True
                self._store.set(f"beat/{self._own}", word or str(number))
                if word:
                    self._said_word.set()
                there = [rank for rank in ranks if self._counts[rank][0] or self._store.check([f"beat/{rank}"])]
                values = dict(zip(there, self._store.multi_get([f"beat/{n}" for n in there]), strict=True))
                if self._ending is None and self._store.check(["ending"]):
                    self._take_up(_Ending(*json.loads(self._store.get("ending"))))
                for rank, value in values.items():
                    if value != self._counts[rank][0]:
                        self._counts[rank] = value, time.monotonic()
                    if value.decode().startswith(_LEFT):
                        self._left.add(rank)
                self._reached = time.monotonic()
            except RuntimeError as error:
                if self._over.is_set() or 0 in self._left:
                    return
                if "time" not in str(error).lower():  # timed out: that is what the watch is for
                    text = (
                        f"The launcher of {self._machines[0].place} has ended: it was killed, or its machine stopped."
                    )
                    self._tell(_Ending(f"{text}{_LAST}", 1, lost=(0,)))
                    self._said_word.set()
                    return
            self._wake.wait(_WATCH_S if self._word else _COUNT_S)
            self._wake.clear()

    def _watch(self) -> None:
        """Ends the workers once there is a reason, and the process if its main thread does not end then."""
        since, before = 0.0, time.monotonic()
        while not self._over.wait(_WATCH_S):
            now = time.monotonic()
            if now - before > _STILL_S:
                self._awake = now
            before = now
            if self._ending is None and (silence := self._find_silence(now)) is not None:
                self._tell(silence)
            if self._ending is None or now < self._ending.after or self._word:
                continue
            since = since or now
            self._print(self._ending)
            kill_descendants()
            if now - since > _END_S:
                os._exit(self._ending.code)

    def _find_silence(self, now: float) -> _Ending | None:
        limit = min(self._timeout_s, _SUSPECT_S) if self._lost_ranks else self._timeout_s
        here, quiet = self._machines[self._own].place, now - max(self._reached, self._awake)
        if self._own and 0 not in self._left and quiet > limit:
            text = (
                f"{capital(here)} has not reached {self._machines[0].place} for {quiet:.0f} s: the network between "
                "them is cut, or machine 0 is down."
            )
            return _Ending(f"{text}{_LAST}", 1, lost=(0,))
        still = {rank: now - max(at, self._awake) for rank, (_, at) in self._counts.items() if rank not in self._left}
        silent = {rank: stood for rank, stood in still.items() if stood > limit}
        # A machine does not know what it could not read. Those that fall silent together pass the limit one by one:
        # the first waits until it is plain whether it is the only one.
        doubtful = any(limit / 2 < stood <= limit for stood in still.values())
        if not silent or quiet > limit / 2 or (doubtful and max(silent.values()) < 2 * limit):
            return None
        names = " and ".join(self._machines[rank].place for rank in silent)
        self._left |= silent.keys()
        have, for_s = "have" if len(silent) > 1 else "has", min(silent.values())
        text = f"{capital(names)} {have} not been heard of for {for_s:.0f} s"
        if len(silent) == len(self._counts) > 1:
            text = f"{text} by {here}, which is itself cut off the network, or all of them are down."
        else:
            text = f"{text}: {'they are' if len(silent) > 1 else 'it is'} down, or cut off the network."
        return _Ending(f"{text}{_LAST}", 1, lost=tuple(silent))


def kill_descendants() -> None:
    """Kills every process that this one has started, and theirs."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()

"""Names by which the ranks of an attempt of a launch find each other, and no others. Loads no torch."""

import os
import socket

from finetune.utils import orphan_watch

TRIAL = "FINETUNE_TRIAL"
"""Variable that is added to the names, so that processes which ranks start can form a group of their own."""

ROUND = "FINETUNE_ROUND"
"""Variable by which an elastic launch tells the number of its rendezvous's round, from 0, on which all machines agree.
How often each has started its workers again may differ."""


def attempt_number() -> int:
    """Returns how often the ranks of this launch have been started again."""
    return int(os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def attempt_name() -> str:
    """Returns the name of this attempt of a launch, or of this trial, by which its ranks meet no others."""
    return f"{attempt_number()}{os.environ.get(TRIAL, '')}"


def machine_name() -> str:
    """Returns this machine's name for people."""
    return f"machine {os.environ.get('GROUP_RANK', '0')} ({socket.gethostname()})"


def rank_name(rank: int) -> str:
    """Returns the name of a rank of this machine for people, with the machine where there are several."""
    return f"rank {rank} on {machine_name()}" if orphan_watch.on_several_machines() else f"rank {rank}"

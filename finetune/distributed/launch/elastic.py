"""Launches whose machines may fail, leave, return and be more: torch's elastic agents, and the store where they meet.

Accelerate gives torchrun a fixed number of machines and a rendezvous that the first of them hosts, whatever a launch
file says; here torchrun's arguments are completed. All machines are clients of a store that `host_store` keeps on a
host of its own, since what an agent hosts would be gone with its machine. In each round of the rendezvous ranks meet at
a new address, that of the machine of rank 0, so that no round hears of an earlier one.
"""

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from finetune.distributed.launch.launch_schema import LaunchFile
from finetune.distributed.launch.network_interface import bare_host, find_interface, interface_variables
from finetune.distributed.rendezvous_names import ROUND
from finetune.utils.errors import BackendError
from finetune.utils.exit_codes import REQUEUE, USER_ERROR
from finetune.utils.quoting import to_stderr
from finetune.utils.signals import Interrupted

_BACKEND = "finetune"

# A machine that is not heard of for 8 x 5 s counts as lost: after a cut of 20 s, TCP sends again after 25 s. For a
# store that does not answer torch's client waits 30 s.
_SETTINGS = "is_host=0,keep_alive_interval=5,keep_alive_max_attempt=8,read_timeout=30"


@contextmanager
def elastic_agents(asked: LaunchFile, leaves: Callable[[], bool], end_workers: Callable[[], object]) -> Iterator[None]:
    """Has torchrun start an elastic agent.

    Args:
        asked: The launch file, with the launcher's options in place of what it says; `nnodes` is among them.
        leaves: Tells if this machine has been asked to stop, so that the others go on without it.

    Raises:
        BackendError: If this machine has no way to the store's host.
    """
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    from finetune.utils.compat.torch_private import no_failure

    # torch would share one store, whose address it remembers although rank 0 has moved to another machine.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    host, plain = bare_host(asked.main_process_ip or ""), run.config_from_args
    try:
        interface = find_interface(host)
    except socket.gaierror as error:
        raise BackendError(
            f"main_process_ip is {host}, which has no address here ({error.strerror}). Give the address of the host "
            "that runs `finetune rendezvous`."
        ) from error
    os.environ.update(interface_variables(interface, os.environ))

    def completed(arguments: Any) -> Any:
        arguments.nnodes, arguments.local_addr = asked.nnodes, interface.address
        arguments.rdzv_backend, arguments.rdzv_id = _BACKEND, "finetune"
        arguments.rdzv_endpoint = f"{f'[{host}]' if ':' in host else host}:{asked.main_process_port}"
        arguments.rdzv_conf = ",".join(filter(None, (_SETTINGS, asked.rdzv_conf)))
        return plain(arguments)

    def cut_off() -> None:
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"\nError: {why_ended(TimeoutError(), asked)}\n".encode())
        end_workers()
        os._exit(USER_ERROR)

    rendezvous_handler_registry.register(
        _BACKEND, lambda parameters: _create_handler(parameters, leaves, end_workers, cut_off)
    )
    with (
        patch.object(run, "config_from_args", completed),
        # They have saved, since a machine was asked to stop.
        no_failure(REQUEUE, lambda handler: handler.note_stop()),
    ):
        yield


def _create_handler(
    parameters: Any, leaves: Callable[[], bool], end_workers: Callable[[], object], cut_off: Callable[[], None]
) -> Any:
    """Returns torch's c10d rendezvous, which also tells workers of the round, and ends it when a machine is lost."""
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousGracefulExitError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    from finetune.utils.compat.torch_private import leave_rendezvous, rendezvous_state

    backend, store = create_backend(parameters)
    handler: Any = create_handler(store, backend, parameters)
    join, close = handler.next_rendezvous, handler.shutdown
    count_waiting = _bounded(handler.num_nodes_waiting, handler.settings, cut_off)
    together: set[Any] = set()

    def next_rendezvous() -> Any:
        try:
            count_waiting()  # which reads the state
            if ROUND not in os.environ and len(rendezvous_state(handler).participants) == handler.settings.max_nodes:
                to_stderr("As many machines as --nnodes allows are there. This one waits to take the place of another.")
            info = join()
        except RendezvousGracefulExitError as error:
            # torch's agent would fail over a machine that has waited for a place and is not needed.
            raise SystemExit(0) from error
        except Interrupted as error:
            if ROUND not in os.environ:
                raise
            to_stderr(f"Stopped by {error} between two rounds. The same command joins again.")
            raise SystemExit(REQUEUE) from error
        state = rendezvous_state(handler)
        together.clear()
        together.update(state.participants)
        os.environ[ROUND] = str(state.round)
        if info.rank == 0:
            to_stderr(f"Round {state.round}: {len(together)} machine(s), rank 0 is here.")
        return info

    def num_nodes_waiting() -> int:
        waiting = count_waiting()
        if not together <= rendezvous_state(handler).participants.keys():
            with suppress(RuntimeError):
                if store.check([stopped()]):
                    return 0  # it has saved together with the others, whose workers end as well
            # The workers here may wait for those of the machine that has left for half an hour.
            to_stderr(
                "A machine has left: a process there has failed, or it is not heard of any more. A new round begins."
            )
            end_workers()
            return 1
        if waiting:
            to_stderr(f"{waiting} machine(s) wait to join. Processes save and end, and a new round begins.")
        return waiting

    def stopped() -> str:
        return f"finetune/stopped/{os.environ[ROUND]}"

    def note_stop() -> None:
        with suppress(RuntimeError):
            store.set(stopped(), "")

    def shutdown() -> bool:
        # A rendezvous that is closed is so for all machines.
        if leaves():
            with suppress(RendezvousError):
                leave_rendezvous(handler)
        elif not isinstance(sys.exception(), RendezvousError):
            close()
        return True

    handler.next_rendezvous, handler.num_nodes_waiting = next_rendezvous, num_nodes_waiting
    handler.note_stop = note_stop
    handler.shutdown, handler.get_backend = shutdown, lambda: _BACKEND
    return handler


def _bounded(ask: Callable[[], int], settings: Any, cut_off: Callable[[], None]) -> Callable[[], int]:
    """Returns a question to the store that ends this machine if others must take it for lost before there is an answer.

    On a link that is cut, a thread of torch waits in a call of the store that no timeout ends, with a lock that
    everyone else needs.
    """
    limit_s = settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt
    until = math.inf

    def watch() -> None:
        while True:
            late = time.monotonic() >= until
            time.sleep(0.5)
            # After a second look: where this process itself stood still, the answer is there.
            if late and time.monotonic() >= until:
                return cut_off()

    threading.Thread(target=watch, name="store", daemon=True).start()

    def bounded() -> int:
        nonlocal until
        until = time.monotonic() + limit_s
        try:
            return ask()
        finally:
            until = math.inf

    return bounded


def why_ended(error: Exception, asked: LaunchFile) -> str:
    """Returns a sentence for an error of the rendezvous, which ends the launch on this machine."""
    from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousTimeoutError

    server = f"{asked.main_process_ip}:{asked.main_process_port}"
    if isinstance(error, RendezvousClosedError):
        return (
            f"The launch that has met at {server} is over: it has finished, or a machine has used up its "
            "--max_restarts. For a new launch, start `finetune rendezvous` there anew."
        )
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"Fewer machines than --nnodes {asked.nnodes} asks for have come to {server} in time. Start the others, or "
            "ask for fewer. The wait is --rdzv_conf join_timeout=SECONDS."
        )
    return (
        f"The store at {server}, where the machines of this launch meet, does not answer. Run `finetune rendezvous` on "
        "a host that all machines reach and that outlives them, and give its address as --main_process_ip; if it runs, "
        "this machine or its network is cut off."
    )


def host_store(port: int, say: Callable[[str], None]) -> None:
    """Hosts the store where the machines of one elastic launch meet, until a signal asks to end.

    Raises:
        BackendError: If the port is taken.
    """
    import torch

    distributed: Any = torch.distributed
    what, advice = f"--port {port} cannot be listened on", "Choose another one, or 0."
    with BackendError.explaining(what, advice, RuntimeError, ValueError):
        store = distributed.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    say(f"Machines meet here: --main_process_ip {socket.gethostname()} --main_process_port {store.port}")
    while True:
        signal.pause()

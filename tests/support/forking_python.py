"""A `python` for commands that tests give to a shell: each start is a fork of a process that has imported everything.

`ForkingPython` writes an executable, which stands in for Python's own: it asks a server for a fork, hands over its
arguments, environment, folder and open files, passes signals on, and ends with the fork's exit code. A fork whose
executable is killed is killed as well. In forks `sys.executable` is that executable, so that what they start is quick
too. Options but `-u` and `-m` need a Python of their own, and get it.
"""

import atexit
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from forkserver import ForkServer, run_program, until
from harness import RUN_S, environment

_CLIENT = """#!{python} -SE
import json, os, resource, signal, socket, sys
words = sys.argv[1:]
plain = [word for word in words if word != "-u"] if words[:1] == ["-u"] else words
if not plain or (plain[0].startswith("-") and plain[0] != "-m"):
    os.execv({python!r}, [{python!r}, *words])
signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
ignored = [int(number) for number in signals if signal.getsignal(number) is signal.SIG_IGN]
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
limits = resource.getrlimit(resource.RLIMIT_DATA)
asked = json.dumps([plain, dict(os.environ), os.getcwd(), ignored, limits]).encode()
server.sendall(len(asked).to_bytes(8, "big") + asked)
socket.send_fds(server, [b"f"], [0, 1, 2])
child = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big")
for number in signals:
    if int(number) not in ignored:
        signal.signal(number, lambda number, _: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
code = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "big", signed=True)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


class ForkingPython:
    """The executable, and the server that it asks."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        """
        Args:
            folder: For the executable and the server's socket; its path is short enough for one.
        """
        address, self.executable = folder / "socket", folder / "python"
        self.executable.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
        self.executable.chmod(0o755)
        log = folder / "log"
        words = [__file__, str(address), str(self.executable)]
        self._server = fork_server.python(words, environment(), log, log)
        until(lambda: address.exists() or self._server.exitcode is not None, RUN_S, "no server")
        assert self._server.exitcode is None, log.read_text()

    def end(self) -> None:
        self._server.kill()
        self._server.join()


def serve(address: str, executable: str) -> None:
    """Forks for everybody who asks, until it is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    sys.executable = executable
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen(64)
    os.rename(f"{address}.new", address)
    while True:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _attend(client)
            finally:
                os._exit(1)
        client.close()


def _attend(client: socket.socket) -> None:
    """Forks for one client, and tells it how the fork ends."""
    size = int.from_bytes(client.recv(8, socket.MSG_WAITALL), "big")
    words, env, cwd, ignored, limits = json.loads(client.recv(size, socket.MSG_WAITALL))
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    child = os.fork()
    if child == 0:
        client.close()
        resource.setrlimit(resource.RLIMIT_DATA, limits)
        _become(words, env, cwd, files, ignored)
    for file in (*files, 0, 1, 2):
        os.close(file)
    client.sendall(child.to_bytes(8, "big"))
    ended = os.pidfd_open(child)
    readable, _, _ = select.select([client, ended], [], [])
    if ended not in readable:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(OSError):
        client.sendall(code.to_bytes(8, "big", signed=True))


def _become(words: list[str], env: dict[str, str], cwd: str, files: list[int], ignored: list[int]) -> Any:
    code = 1
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        # Streams as a new Python has them, whose encoder and buffer the server has used for its own.
        sys.stdin, sys.stdout = os.fdopen(0, "r"), os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
        run_program(words, env, cwd)
        code = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):
            # As Python ends, so that a shell sees that it was Ctrl-C.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    gc.freeze()
    serve(*sys.argv[1:])

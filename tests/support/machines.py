"""Machines for tests: namespaces of Linux, each with a network card, processes, host name, home and temporary folder.

    with Machines(tmp_path, 2) as machines:
        first = machines[0].start([sys.executable, ...])
        machines[1].cut()

Their cards, `eth0`, are joined by a switch, a bridge in a namespace of its own; the machines lie in namespaces below
that. Nothing of it is seen on the host or by other tests, so addresses need not differ. All of it ends with the process
that has made it, by whatever means that ends. Files are those of the host: what `TMPDIR`, `HOME` or a working directory
does not set apart is shared.
"""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil
from external_commands import require, why_missing
from forkserver import until
from harness import RUN_S, environment

LACK = "machines cannot be made here"
"""How the reason begins for which tests of machines are skipped where namespaces are not permitted."""

LOOPBACK = "127.0.1.1"
"""The address that Debian's installer gives a machine's own name."""

_NETWORK = "10.78.0"
_SLOW_LINK = str(Path(__file__).with_name("slow_link.py"))

# The first process of a namespace of processes: the others end with it. It waits until what holds it lets go of its
# standard input, and leaves no zombies, for which signals must be ignored before it becomes `cat`.
_WAIT = "echo up && trap '' CHLD && exec cat >/dev/null"
_SWITCH = f"ip link add br0 type bridge && ip link set br0 up && {_WAIT}"
_MACHINE = (
    'hostname "$0" && mount --bind "$1" /etc/hosts && mount -t tmpfs tmpfs /dev/shm && ip link set lo up && ' + _WAIT
)
_OWN = ["--net", "--pid", "--mount", "--uts", "--ipc"]


@functools.cache
def lacking() -> str | None:
    """Returns why machines cannot be made here, as far as a test may be skipped for it; None if they can."""
    if reason := why_missing("hostname", "ip", "mount", "nsenter", "unshare"):
        return reason
    # All that a switch and a machine are made of.
    script = (
        "ip link add br0 type bridge && ip link add p0 type veth peer name eth0 && hostname m0 && "
        "mount --bind /dev/null /etc/hosts && mount -t tmpfs tmpfs /dev/shm"
    )
    words = ["unshare", *_as_root(), *_OWN, "--fork", "--mount-proc", "sh", "-c", script]
    tried = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return f"{LACK}: {' '.join(tried.stderr.split())}" if tried.returncode else None


def _as_root() -> list[str]:
    """Options of `unshare` by which any user is root among the machines."""
    return [] if os.geteuid() == 0 else ["--user", "--map-root-user"]


class Program:
    """A command that runs on a machine."""

    def __init__(self, process: subprocess.Popen[bytes], printed: Path) -> None:
        self._process, self._printed = process, printed

    @property
    def pid(self) -> int:
        """The command's number on the host."""
        until(lambda: _below(self._process) != self._process.pid, 30.0, "nsenter has started nothing")
        return _below(self._process)

    @property
    def code(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._printed.read_text(errors="replace")

    def signal(self, number: int) -> None:
        """Sends a signal to the command."""
        os.kill(self.pid, number)

    def wait(self, limit_s: float = RUN_S) -> int:
        """Waits for its end; returns the exit code."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"not at its end within {limit_s:g} s:\n{self.output[-6000:]}") from error


class _Namespace:
    """A first process that holds namespaces, and commands that are run in them."""

    def __init__(self, words: Sequence[str], kinds: Sequence[str]) -> None:
        self._kinds = kinds
        self._holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", f"{' '.join(words)} has failed, see above"
        self.init = _below(self._holder)

    def words(self, *kinds: str) -> list[str]:
        """Words that a command comes after, to be run inside."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", f"--target={self.init}", *user, *(kinds or self._kinds), "--"]

    def ip(self, *words: object) -> None:
        """Runs `ip` in the network, with the host's process numbers."""
        subprocess.run([*self.words("--net"), "ip", *map(str, words)], check=True, timeout=60)

    def end(self) -> None:
        """Kills all that runs inside."""
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)
        self._holder.kill()
        self._holder.communicate()


class Machine:
    """A machine, which runs from the start."""

    def __init__(self, switch: _Namespace, folder: Path, number: int, hosts: Path) -> None:
        self.number, self.folder, self.hosts = number, folder, hosts
        """`folder` is its own: working directory, home and temporary files lie there. `hosts` is its `/etc/hosts`."""
        self.name, self.address = f"m{number}", address(number)
        self._switch, self._started, self._link = switch, 0, None
        self._on_switch = f"p{number}"
        folder.mkdir(parents=True)
        for part in ("home", "tmp"):
            (folder / part).mkdir()
        self.boot()

    def boot(self) -> None:
        """Starts the machine, which must be off, with its name and address."""
        inside = ["unshare", *_OWN, "--fork", "--kill-child", "--mount-proc", "sh", "-c", _MACHINE]
        self._own = _Namespace([*self._switch.words(), *inside, self.name, str(self.hosts)], _OWN)
        port, here = f"p{self.number}", self._own.ip
        # The same card each time, since the others remember it.
        card = f"02:00:00:00:00:{self.number + 1:02x}"
        self._switch.ip("link", "add", port, "type", "veth", "peer", "eth0", "address", card, "netns", self._own.init)
        self._switch.ip("link", "set", port, "master", "br0", "up")
        here("addr", "add", f"{self.address}/24", "dev", "eth0")
        here("addr", "add", f"fd78::{self.number + 1:x}/64", "dev", "eth0", "nodad")
        here("link", "set", "eth0", "up")
        self._enter("--net", words=[sys.executable, _SLOW_LINK, "plain", "eth0"])

    def environment(self, **extra: str) -> dict[str, str]:
        """What tests run under, with folders of the machine's own."""
        home = self.folder / "home"
        own = {"HOME": home, "XDG_CACHE_HOME": home / ".cache", "XDG_STATE_HOME": home / ".local" / "state"}
        return environment(**{name: str(path) for name, path in own.items()}, TMPDIR=str(self.folder / "tmp"), **extra)

    def start(self, words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Program:
        """Starts a command.

        Args:
            env: Variables beside those of `environment`.
            cwd: The working directory; the machine's own folder if left out.
        """
        self._started += 1
        printed = self.folder / f"{self._started}.out"
        # Entering a namespace of mounts leads to its root.
        entered = [*self._own.words(), "sh", "-c", 'cd "$0" && exec "$@"', str(cwd or self.folder)]
        with printed.open("wb") as file:
            process = subprocess.Popen(
                [*entered, *words],
                env=self.environment(**(env or {})),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Program(process, printed)

    def run(self, words: Sequence[str], *, limit_s: float = RUN_S, **options: Any) -> tuple[int, str]:
        """Runs a command to its end, as `start` does; returns its exit code and everything that it printed."""
        program = self.start(words, **options)
        return program.wait(limit_s), program.output

    def processes(self) -> list[psutil.Process]:
        """Returns what runs on the machine, but for what has ended and is not waited for."""
        here, found = _processes_of(self._own.init), []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess):
                inside = process.pid != self._own.init and _processes_of(process.pid) == here is not None
                if inside and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_idle(self, limit_s: float = 30.0) -> None:
        """Returns once nothing runs on the machine; fails if that takes too long."""
        until(
            lambda: not self.processes(),
            limit_s,
            lambda: f"{self.name} still runs {list(map(_line, self.processes()))}",
        )

    def kill(self, *, silently: bool = False) -> None:
        """Kills all that runs on the machine and turns it off; its firewall and its slow cable are gone.

        Args:
            silently: As if its power failed: the others hear nothing, not even that its connections end.
        """
        if silently:
            self.cut()
        self._own.end()
        self._end_link()
        # It goes with the card, sooner or later.
        words = [*self._switch.words("--net"), "ip", "link", "del", f"p{self.number}"]
        subprocess.run(words, stderr=subprocess.DEVNULL, timeout=60)

    def end(self) -> None:
        """Kills all that runs on the machine, for good."""
        self._own.end()

    def cut(self) -> None:
        """Cuts the cable: nothing comes or goes any more, and nobody is told."""
        self._switch.ip("link", "set", self._on_switch, "nomaster")

    def join(self) -> None:
        """Mends the cable."""
        self._switch.ip("link", "set", self._on_switch, "master", "br0")

    def slow_down(self, *, delay_s: float, loss: float = 0.0) -> None:
        """Makes the cable a slow one.

        Args:
            delay_s: Seconds that each frame takes, there and back alike.
            loss: Share of frames that never come, from 0 to 1.
        """
        assert self._link is None, "the cable is slow already"
        port, inner, outer = f"p{self.number}", f"q{self.number}", f"r{self.number}"
        self._switch.ip("link", "set", port, "nomaster")
        self._switch.ip("link", "add", inner, "type", "veth", "peer", "name", outer)
        self._switch.ip("link", "set", inner, "up")
        words = [sys.executable, _SLOW_LINK, str(delay_s), str(loss), port, inner]
        self._link = subprocess.Popen(
            [*self._switch.words("--net", "--pid"), *words], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert self._link.stdout is not None
        assert self._link.stdout.readline() == b"up\n"
        self._on_switch = outer
        self._switch.ip("link", "set", outer, "master", "br0", "up")

    def speed_up(self) -> None:
        """Undoes `slow_down`."""
        self._end_link()
        self.join()

    def _end_link(self) -> None:
        if self._link is not None:
            os.kill(_below(self._link), signal.SIGKILL)
            self._link.communicate()
            self._switch.ip("link", "del", self._on_switch)
            self._link, self._on_switch = None, f"p{self.number}"

    def allow_only(self, *ports: int) -> None:
        """Has a firewall drop every new TCP connection to the machine but those to some ports."""
        require("nft")
        allowed = ", ".join(map(str, ports))
        rule = f"iif != lo tcp flags & (syn | ack) == syn tcp dport != {{ {allowed} }} drop"
        table = f"table inet wall {{\nchain input {{\ntype filter hook input priority 0\n{rule}\n}}\n}}"
        self._enter("--net", words=["nft", table])

    def allow_all(self) -> None:
        """Undoes `allow_only`."""
        self._enter("--net", words=["nft", "delete table inet wall"])

    def _enter(self, *kinds: str, words: list[str]) -> None:
        subprocess.run([*self._own.words(*kinds), *words], check=True, timeout=60)


class Machines(Sequence[Machine]):
    """Machines that are joined; they end with the block.

    Args:
        folder: For a folder of each machine; it must not have been used before.
        own_address: What each machine's own name leads to in its `/etc/hosts`, such as `LOOPBACK`; its address on the
            network if left out. The names of the others lead to theirs.
    """

    def __init__(self, folder: Path, number: int, *, own_address: str | None = None) -> None:
        self.folder = folder
        self._number, self._own_address = number, own_address
        self._machines: list[Machine] = []

    def __enter__(self) -> Self:
        words = ["unshare", *_as_root(), "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        self._switch = _Namespace([*words, "sh", "-c", _SWITCH], ["--net", "--pid", "--mount"])
        try:
            for _ in range(self._number):
                self.add()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # All machines are below it.
        self._switch.end()
        for machine in self._machines:
            machine.end()

    def __getitem__(self, number: Any) -> Any:
        return self._machines[number]

    def __len__(self) -> int:
        return len(self._machines)

    def add(self) -> Machine:
        """Adds one more machine."""
        number = len(self._machines)
        hosts = self.folder / f"hosts-{number}"
        self.folder.mkdir(parents=True, exist_ok=True)
        # A machine that is added later has a name as well.
        addresses = {f"m{other}": address(other) for other in range(max(8, self._number))}
        if self._own_address is not None:
            addresses[f"m{number}"] = self._own_address
        lines = ["127.0.0.1 localhost", *(f"{place} {name}" for name, place in addresses.items())]
        hosts.write_text("\n".join(lines) + "\n")
        self._machines.append(Machine(self._switch, self.folder / f"m{number}", number, hosts))
        return self._machines[-1]

    def kill_programs(self) -> None:
        """Kills what still runs on the machines, which stay."""
        for machine in self._machines:
            for process in machine.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            machine.wait_until_idle()


def address(number: int) -> str:
    """Returns the address of a machine."""
    return f"{_NETWORK}.{number + 1}"


def _below(process: subprocess.Popen[bytes]) -> int:
    """Returns the last of the processes that each start one other: that which `nsenter` and `unshare` make way for."""
    last = psutil.Process(process.pid)
    while last.name() in ("nsenter", "unshare") and (children := last.children()):
        last = children[0]
    return last.pid


def _processes_of(pid: int) -> str | None:
    """Returns the namespace of processes that a process is in; None if it has ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/pid")
    return None


def _line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return str(process.pid)

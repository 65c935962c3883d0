import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from external_commands import needs
from forkserver import until
from harness import environment
from machines import LOOPBACK, Machines, Program

pytestmark = [pytest.mark.machines, pytest.mark.xdist_group("machines_meet")]

PORT = 4000
ECHO = f"""
import socket
server = socket.create_server(("", {PORT}))
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    while said := connection.recv(100):
        connection.sendall(said)
"""
ASK = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], {PORT}), timeout=1)
began = time.monotonic()
connection.sendall(b"x")
assert connection.recv(100) == b"x"
print(time.monotonic() - began)
"""
LISTEN = f"""
import socket
connection = socket.create_connection(("m0", {PORT}))
connection.sendall(b"x")
connection.recv(1)
print("connected", flush=True)
try:
    print("ended", connection.recv(1))
except OSError as error:
    print("ended", type(error).__name__)
"""


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with Machines(tmp_path_factory.mktemp("machines") / "own", 2) as made:
        yield made


@pytest.fixture
def echo(machines: Machines) -> Iterator[Program]:
    program = machines[0].start([sys.executable, "-c", ECHO])
    until(lambda: "ready" in program.output, 30.0, "no server")
    yield program
    machines.kill_programs()


def reached(machines: Machines) -> float | None:
    """Seconds there and back; None if the first machine does not answer."""
    code, output = machines[1].run([sys.executable, "-c", ASK, "m0"])
    return None if code else float(output)


def once_reached(machines: Machines) -> float:
    """Seconds there and back, once it answers: whoever has looked for it in vain asks again a second later."""
    found: list[float | None] = []
    until(lambda: found.append(reached(machines)) is None and found[-1] is not None, 60.0, "no answer")
    return found[-1] or 0.0


@needs("ps")
def test_a_machine_has_things_of_its_own(machines: Machines) -> None:
    script = 'hostname; hostname -i; echo "$TMPDIR" "$HOME"; pwd; ps -e -o comm=; ls /dev/shm; exit 3'
    for machine in machines:
        code, output = machine.run(["sh", "-c", script])
        name, place, folders, cwd, *processes = output.split("\n")[:-1]
        assert (code, name, place) == (3, machine.name, machine.address)
        assert folders == f"{machine.folder / 'tmp'} {machine.folder / 'home'}"
        assert cwd == str(machine.folder)
        assert processes == ["cat", "sh", "ps"]
    links = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout
    assert "br0" not in links
    assert machines[0].address not in subprocess.run(["ip", "addr"], capture_output=True, text=True).stdout


def test_cables(machines: Machines, echo: Program) -> None:
    first = machines[0]
    until(lambda: (reached(machines) or 1.0) < 0.2, 60.0, "an answer always takes as long as over a slow cable")
    first.cut()
    assert reached(machines) is None
    first.join()
    once_reached(machines)
    first.slow_down(delay_s=0.1)
    assert once_reached(machines) >= 0.2
    first.cut()
    assert reached(machines) is None
    first.join()
    assert once_reached(machines) >= 0.2
    first.speed_up()
    first.slow_down(delay_s=0.0, loss=1.0)
    assert reached(machines) is None
    first.speed_up()
    once_reached(machines)


def test_a_firewall(machines: Machines, echo: Program) -> None:
    machines[0].allow_only(PORT + 1)
    assert reached(machines) is None
    machines[0].allow_all()
    machines[0].allow_only(PORT, PORT + 1)
    once_reached(machines)
    machines[0].allow_all()


@pytest.mark.parametrize("silently", [False, True])
def test_a_machine_dies_and_returns(machines: Machines, echo: Program, silently: bool) -> None:
    listener = machines[1].start([sys.executable, "-c", LISTEN])
    until(lambda: "connected" in listener.output, 30.0, lambda: listener.output)
    assert [process.pid for process in machines[0].processes()] == [echo.pid]
    if silently:
        machines[0].slow_down(delay_s=0.0)
    machines[0].kill(silently=silently)
    assert echo.wait() == -9
    assert machines[0].processes() == []
    if silently:
        assert reached(machines) is None
        assert listener.code is None
    else:
        assert listener.wait() == 0
        assert "ended" in listener.output
    machines[0].boot()
    again = machines[0].start([sys.executable, "-c", ECHO])
    until(lambda: "ready" in again.output, 30.0, "no server")
    once_reached(machines)


@needs("getent")
def test_own_name(tmp_path: Path) -> None:
    with Machines(tmp_path / "own", 1, own_address=LOOPBACK) as machines:
        assert machines[0].run(["getent", "hosts", "m0"])[1].split() == [LOOPBACK, "m0"]
        assert machines.add().run(["getent", "hosts", "m0"])[1].split() == [machines[0].address, "m0"]


def test_they_end_with_whoever_made_them(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from machines import Machines
with Machines(Path(sys.argv[1]), 1) as machines:
    program = machines[0].start(["sleep", "1000"])
    machines[0].slow_down(delay_s=0.0)
    print(program.pid, machines[0]._link.pid, flush=True)
    time.sleep(1000)
"""
    words = [sys.executable, "-c", code, str(tmp_path / "own")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment(), text=True) as maker:
        assert maker.stdout is not None
        try:
            pids = list(map(int, maker.stdout.readline().split()))
            assert len(pids) == 2
            assert all(map(psutil.pid_exists, pids))
        finally:
            maker.kill()  # the block waits for its end
    until(lambda: not any(map(psutil.pid_exists, pids)), 30.0, f"{pids} are there")

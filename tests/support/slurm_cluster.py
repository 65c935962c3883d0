"""A Slurm cluster of this one machine, made of Debian's package: no systemd, no cgroups, no munge."""

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from external_commands import needs
from forkserver import until
from harness import RUN_S, WAIT_S, environment
from ranks import free_port

from finetune.distributed.launch.network_interface import own_addresses

WHERE = f"{os.environ['PATH']}:/usr/sbin"
needs_slurm = needs("sbatch", "slurmctld", "slurmd", path=WHERE)

# The first node's name is an address of this machine, by which other nodes find it: launchers refuse 127.0.0.1. The
# GPU is none: a launch sees none behind it. `cred_expire` is also how long a requeued job waits, and 5 the least.
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
MpiDefault=none
SwitchType=switch/none
TaskPlugin=task/none
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
GresTypes=gpu
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2
"""


NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=64 RealMemory=1000 Gres=gpu:1"


class SlurmCluster:
    """A cluster that runs, and its commands."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.folder, self.env = folder, env

    def ask(self, *words: str) -> str:
        """Runs a command of Slurm; returns what it prints, or "" if it fails."""
        done = subprocess.run(words, env=self.env, cwd=self.folder, text=True, capture_output=True, timeout=WAIT_S)
        return done.stdout.strip() if done.returncode == 0 else ""

    def submit(self, *words: str) -> str:
        """Submits a job; returns its number."""
        job = self.ask("sbatch", "--parsable", *words)
        assert job, f"sbatch refused {words}"
        return job

    def state(self, job: str) -> dict[str, str]:
        """Returns what the controller knows of a job."""
        return dict(word.partition("=")[::2] for word in self.ask("scontrol", "show", "job", job).split())

    def over(self, job: str) -> bool:
        """Tells if a job has ended, and is not requeued, or if no node could start it."""
        state = self.state(job)
        return state["Reason"].endswith("_held") or state["JobState"] in (
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "NODE_FAIL",
        )

    def output(self, job: str) -> str:
        """Returns what a printed job has said so far."""
        return "\n".join(file.read_text() for file in self.folder.glob(f"finetune-*-{job}.out"))


@contextmanager
def slurm_cluster(folder: Path, nodes: int, path: str) -> Iterator[SlurmCluster]:
    """Starts a controller and a daemon for each node; ends them, and what they run, afterwards.

    Args:
        path: PATH of jobs, before the system's.
    """
    (folder / "state").mkdir(parents=True)
    ports = [free_port() for _ in range(nodes + 1)]
    host, reached = socket.gethostname(), next(address for address in own_addresses() if "." in address)
    names = [reached, *(f"node{number}" for number in range(1, nodes))]
    lines = [NODE.format(name=name, host=host, port=port) for name, port in zip(names, ports[1:], strict=True)]
    # Sockets lie there, whose paths have 107 characters at most.
    spool = tempfile.mkdtemp(prefix="slurmd-")
    settings = {"spool": spool, "host": host, "user": getpass.getuser(), "folder": folder, "nodes": "\n".join(lines)}
    text = CONF.format(**settings, port=ports[0])
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    env = environment(SLURM_CONF=str(folder / "slurm.conf"), PATH=f"{path}:{WHERE}", SLURM_TIME_FORMAT="standard")
    cluster = SlurmCluster(folder, env)
    daemons = [["slurmctld", "-c"], *(["slurmd", "-N", name] for name in names)]
    running = []
    with (folder / "daemons.log").open("ab") as log:
        try:
            for name, *words in daemons:
                command = [shutil.which(name, path=WHERE) or name, "-D", *words]
                running.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))
            said = (folder / "daemons.log").read_text
            until(
                lambda: _ended(running) or cluster.ask("sinfo", "-h", "-t", "idle", "-o", "%D") == str(nodes),
                RUN_S,
                said,
            )
            assert not _ended(running), said()
            yield cluster
        finally:
            if not _ended(running):
                cluster.ask("scancel", "--user", getpass.getuser())
                until(lambda: not cluster.ask("squeue", "-h"), RUN_S, "jobs do not end")
            for daemon in reversed(running):
                daemon.terminate()
            for daemon in running:
                daemon.wait(WAIT_S)
            shutil.rmtree(spool)


def _ended(running: list[subprocess.Popen[bytes]]) -> bool:
    return any(process.poll() is not None for process in running)

"""Verbs of the machine and the shell: comms, completion, ops."""

import argparse
import os
from pathlib import Path
from typing import Any

from finetune.cli.arguments import add_config_file, add_verb, prepare_libraries
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import launch_file


def add_machine_verbs(verbs: Any) -> None:
    """Adds the verbs of this file."""
    verb = add_verb(verbs, "comms", comms, "measure the bandwidth of collectives between processes")
    verb.add_argument("--processes", type=int, metavar="N", help="processes on this machine (default: 2)")
    add_config_file(verb, "a launch file, which says how many processes and machines there are")
    verb.add_argument("--min-bytes", type=int, default=1024, metavar="N", help="smallest message (default: 1024)")
    verb.add_argument(
        "--max-bytes", type=int, metavar="N", help="largest message (default: 16 MiB, or 1 GiB with a GPU)"
    )
    verb.add_argument("--factor", type=int, default=4, metavar="N", help="ratio of one size to the next (default: 4)")
    verb.add_argument("--json", metavar="FILE", help="also write the result to this file")

    verb = add_verb(verbs, "completion", complete, "print a script that completes the command line in a shell")
    verb.add_argument("shell", choices=("bash", "zsh", "fish"))

    add_verb(verbs, "ops", ops, "compile native ops before the first run that needs them")


def comms(parsed: argparse.Namespace) -> None:
    """`finetune comms`: measures in a process that a launcher started, and launches itself in any other."""
    prepare_libraries()
    if "WORLD_SIZE" not in os.environ:
        from finetune.distributed.launch.launcher import launch_workers

        if parsed.processes is not None and parsed.processes < 2:
            raise RecipeError(f"--processes {parsed.processes}: a collective needs two processes or more.")
        if parsed.json is not None and not Path(parsed.json).absolute().parent.is_dir():
            raise RecipeError(f"--json {parsed.json}: there is no folder {Path(parsed.json).parent}. Create it first.")
        processes = parsed.processes or (2 if parsed.config_file is None else None)
        options = [] if processes is None else ["--num_processes", str(processes)]
        given = {name: getattr(parsed, name.replace("-", "_")) for name in ("min-bytes", "max-bytes", "factor", "json")}
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        launch_workers(parsed.config_file or launch_file("ddp"), options, ["comms", *words], module="finetune")
    from finetune.distributed import measure_bandwidth

    sizes = (parsed.min_bytes, parsed.max_bytes, parsed.factor)
    said = measure_bandwidth.run_measurement(sizes, Path(parsed.json) if parsed.json else None)
    if said is not None:
        print("\n".join(said))


def complete(parsed: argparse.Namespace) -> None:
    """`finetune completion`."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["finetune"], shell=parsed.shell))


def ops(parsed: argparse.Namespace) -> None:
    """`finetune ops`."""
    from finetune.distributed.native_ops import build_all

    build_all()

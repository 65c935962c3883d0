"""Verbs of the machine and the shell: comms, completion, ops."""

import argparse
import os
from pathlib import Path
from typing import Any

from finetune.cli import completion
from finetune.cli.arguments import add_verb, prepare_libraries
from finetune.utils.errors import RecipeError
from finetune.utils.shipped_files import launch_file


def add_machine_verbs(verbs: Any) -> None:
    """Adds the verbs of this file."""
    verb = add_verb(verbs, "comms", comms, "measure the bandwidth of collectives between processes")
    verb.add_argument("--processes", type=int, metavar="N", help="on this machine; 2, or those of --config_file")
    verb.add_argument("--config_file", type=launch_file, help="a launch file, for its processes and machines")
    verb.add_argument("--min-bytes", type=int, default=1024)
    verb.add_argument("--max-bytes", type=int, help="16 MiB without a GPU, 1 GiB with one, if left out")
    verb.add_argument("--factor", type=int, default=4, help="from one size to the next; 4 if left out")
    verb.add_argument("--json", metavar="FILE", help="also write the result there")

    text = "print what completes commands, keys, launch files and runs in a shell"
    verb = add_verb(verbs, "completion", complete, text)
    verb.add_argument("shell", choices=completion.SHELLS)

    add_verb(verbs, "ops", ops, "build native ops ahead of the first run that needs them")


def comms(parsed: argparse.Namespace) -> None:
    """`finetune comms`: in a process that a launcher started it measures; in any other it launches itself."""
    prepare_libraries()
    if "WORLD_SIZE" not in os.environ:
        from finetune.distributed.launch.launcher import launch_workers

        if parsed.processes is not None and parsed.processes < 2:
            raise RecipeError(f"--processes {parsed.processes}: one alone has nobody to talk to. Take two at least.")
        if parsed.json is not None and not Path(parsed.json).absolute().parent.is_dir():
            raise RecipeError(f"--json {parsed.json}: there is no folder {Path(parsed.json).parent}. Make it first.")
        if parsed.config_file is None and parsed.processes is None:
            parsed.processes = 2
        options = [] if parsed.processes is None else ["--num_processes", str(parsed.processes)]
        words = ["comms"]
        for name in ("min_bytes", "max_bytes", "factor", "json"):
            if (value := getattr(parsed, name)) is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        launch_workers(parsed.config_file or launch_file("ddp"), options, words, module="finetune")
    from finetune.distributed import measure_bandwidth

    sizes = (parsed.min_bytes, parsed.max_bytes, parsed.factor)
    said = measure_bandwidth.run_measurement(sizes, Path(parsed.json) if parsed.json else None)
    if said is not None:
        print("\n".join(said))


def complete(parsed: argparse.Namespace) -> None:
    """`finetune completion`."""
    print(completion.completion_script(parsed.shell))


def ops(parsed: argparse.Namespace) -> None:
    """`finetune ops`."""
    from finetune.distributed.native_ops.native_ops import build_all

    build_all()

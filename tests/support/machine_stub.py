"""A launch on several machines that trains nothing: `machine_stub.py FOLDER PLAN` launches itself on one of them.

Its workers sum numbers over all ranks again and again, and do what files in FOLDER say: `stop` ends all of them,
`fail2` ends rank 2 with the exit code in it, and `hang2` lets it come to no sum any more: then there is `hangs2`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import yaml

from finetune.distributed.launch import machine_facts
from finetune.distributed.launch.launcher import launch_workers
from finetune.utils import exit_codes, orphan_watch


def launch(folder: Path, plan: dict) -> None:
    """Launches this file's workers; what the plan does not say is as `finetune launch` has it."""
    file = folder / f"launch{plan['rank']}.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "distributed_type": "MULTI_GPU",
                "num_machines": plan["machines"],
                "num_processes": plan["processes"],
                "main_process_ip": plan["host"],
                "main_process_port": plan["port"],
                "rdzv_backend": "static",
                "same_network": True,
            }
        )
    )
    if versions := plan.get("versions"):
        found = machine_facts.library_versions() | versions
        machine_facts.library_versions = lambda: found
    launch_workers(
        str(file),
        ["--machine_rank", str(plan["rank"])],
        [str(folder)],
        module="machine_stub",
        recipe=plan.get("recipe", {}),
        timeouts={"join_timeout_s": plan["join_s"], "heartbeat_timeout_s": plan["heartbeat_s"]},
    )


def work(folder: Path) -> int:
    """Sums until a file says otherwise."""
    import torch
    from torch import distributed

    from finetune.utils.compat.torch_private import start_gloo_with_one_worker

    torch.set_num_threads(1)
    start_gloo_with_one_worker()
    rank = os.environ["RANK"]
    try:
        distributed.init_process_group("gloo")
        while True:
            stop = torch.tensor([float((folder / "stop").exists())])
            distributed.all_reduce(stop)
            (folder / f"ready{rank}").touch()
            if stop.item():
                break
            if (order := folder / f"fail{rank}").exists():
                return int(order.read_text())
            if (folder / f"hang{rank}").exists():
                (folder / f"hangs{rank}").touch()
                signal.pause()
            time.sleep(0.02)
        distributed.destroy_process_group()
    except RuntimeError as error:
        return exit_codes.say_failure(error)
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        with orphan_watch.end_with_parent(128 + signal.SIGTERM):
            code = work(Path(sys.argv[1]))
        sys.stdout.flush()
        os._exit(code)
    launch(Path(sys.argv[1]), json.loads(sys.argv[2]))

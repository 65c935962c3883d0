"""Options of `accelerate launch` that can differ from the launch file or between machines; flags of other launchers."""

OPTIONS = {
    "num_processes": "number of processes over all machines",
    "machine_rank": "rank of this machine, from 0",
    "main_process_ip": "address of the first machine",
    "main_process_port": "a free port on the first machine",
    "max_restarts": "number of restarts after a failure",
    "nnodes": "machines of an elastic launch, least:most; they meet at `finetune rendezvous`",
    "rdzv_conf": "settings of an elastic launch's rendezvous, such as last_call_timeout=30",
}

CONFIG_FLAGS = ("--deepspeed", "--deepspeed_config")
"""Flags by which other launchers' scripts are given DeepSpeed's JSON."""

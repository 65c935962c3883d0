"""The options of `accelerate launch` that can differ from the launch file, or from machine to machine."""

OPTIONS = {
    "num_processes": "processes over all machines",
    "machine_rank": "this machine's number, from 0",
    "main_process_ip": "the first machine's address",
    "main_process_port": "a port that is free on it",
    "max_restarts": "how often to start again after a failure",
}

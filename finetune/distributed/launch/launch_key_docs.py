"""What the keys of a launch file and of a DeepSpeed config mean."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """A key of a launch file."""

    meaning: str
    unit: str = ""
    default: Any = None
    """What Accelerate takes if nobody says."""
    variable: str | None = None
    """The environment variable by which workers hear of it."""
    allowed: tuple[str, ...] = ()
    """The only values, in whatever case; () for all."""
    least: int | None = None
    """A whole number from here on; None: no number."""


# Source: accelerate 1.15, `_validate_launch_command`, which completes only options that are None by themselves.
DEAF = "Accelerate takes it from its own command line, and not from the file."

# The top level, as Accelerate 1.15 knows it. It refuses all others.
GENERAL = {
    "compute_environment": Key("Where the machines are. Only LOCAL_MACHINE is offered.", default="LOCAL_MACHINE"),
    "distributed_type": Key(
        "How processes work together: NO (one process), MULTI_GPU (DDP), FSDP or DEEPSPEED. Without a GPU all of "
        "them run on gloo."
    ),
    "num_machines": Key("Machines that take part; each runs the same command.", "machines", 1, least=1),
    "num_processes": Key("Processes over all machines, one a GPU.", "processes", least=1),
    "machine_rank": Key("This machine's number, from 0.", "", 0, least=0),
    "main_process_ip": Key("The first machine's address, where all processes meet."),
    "main_process_port": Key(
        "A port that is free on the first machine; 0 takes any, on one machine.", "port", 29500, least=0
    ),
    "rdzv_backend": Key(f"How launchers of several machines find each other. {DEAF}", default="static"),
    "same_network": Key(f"Whether all machines see the first one by `main_process_ip`. {DEAF}", default=False),
    "max_restarts": Key("How often the launcher starts all processes again after a failure.", "restarts", 0, least=0),
    "main_training_function": Key("Read for TPUs only.", default="main"),
    "mixed_precision": Key(
        "The recipe's `precision` decides. With its value here, FSDP gathers and computes with copies of the weights "
        "in 16 bit, instead of casting inside operations.",
        default="no",
        variable="ACCELERATE_MIXED_PRECISION",
    ),
    "use_cpu": Key("Leave it out: true makes Accelerate drop sharding and start unrelated processes.", default=False),
    "debug": Key("Accelerate checks shapes before each collective.", default=False, variable="ACCELERATE_DEBUG_MODE"),
    "gpu_ids": Key("The GPUs that are used, by number, or all.", default="all", variable="CUDA_VISIBLE_DEVICES"),
    "enable_cpu_affinity": Key(f"Bind each process to the cores near its GPU. {DEAF}", default=False),
    "fsdp_config": Key("The section of FSDP."),
    "deepspeed_config": Key("The section of DeepSpeed."),
    "parallelism_config": Key("The section on how processes are laid out."),
    "dynamo_config": Key("torch.compile, which this toolkit does not use."),
    "fp8_config": Key("8-bit floats, which this toolkit does not use."),
    "megatron_lm_config": Key("Megatron-LM, which is not offered."),
    "mpirun_config": Key("Starting by mpirun, which is not offered."),
    "downcast_bf16": Key(f"Read for TPUs only. {DEAF}", default=False),
    **dict.fromkeys(
        ("tpu_name", "tpu_zone", "command_file", "commands", "tpu_vm", "tpu_env"), Key("Read for TPUs only.")
    ),
    **dict.fromkeys(("tpu_use_cluster", "tpu_use_sudo"), Key(f"Read for TPUs only. {DEAF}", default=False)),
}

FSDP = {
    "fsdp_config.fsdp_version": Key("Only 2 is offered.", "", 1, "FSDP_VERSION", least=1),
    "fsdp_config.fsdp_auto_wrap_policy": Key(
        "What is gathered as one unit. TRANSFORMER_BASED_WRAP: each transformer layer.",
        variable="FSDP_AUTO_WRAP_POLICY",
        allowed=("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"),
    ),
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": Key(
        "The layer class that is a unit; left out: what the model itself names.",
        variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
    ),
    "fsdp_config.fsdp_reshard_after_forward": Key(
        "Free a unit's weights after its forward pass and gather them again for the backward pass: least memory. "
        "False keeps them: a third less communication.",
        default=True,
        variable="FSDP_RESHARD_AFTER_FORWARD",
    ),
    "fsdp_config.fsdp_sync_each_batch": Key(
        "With several micro-batches a step: true reduce-scatters gradients after each of them, which holds least; "
        "false holds them whole until the last, which sends least; auto: whole where the forecast says that it fits.",
        default="auto",
        variable="FSDP_SYNC_EACH_BATCH",
    ),
    "fsdp_config.fsdp_offload_params": Key(
        "Weights, gradients and optimiser rest in host memory; needs a GPU to compute on.",
        default=False,
        variable="FSDP_OFFLOAD_PARAMS",
    ),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": Key(
        "Only the first process reads the whole checkpoint into host memory.",
        default=True,
        variable="FSDP_CPU_RAM_EFFICIENT_LOADING",
    ),
    "fsdp_config.fsdp_activation_checkpointing": Key(
        "Refused if true: `model.gradient_checkpointing` of the recipe recomputes with the same dropout masks.",
        default=False,
        variable="FSDP_ACTIVATION_CHECKPOINTING",
    ),
    "fsdp_config.fsdp_state_dict_type": Key(
        "Read by Accelerate's own checkpoints, which this toolkit does not write.",
        variable="FSDP_STATE_DICT_TYPE",
        allowed=("SHARDED_STATE_DICT", "FULL_STATE_DICT"),
    ),
}

# This toolkit's own keys: Accelerate passes over them, so that workers read them off the file.
OWN = ("fsdp_config.fsdp_sync_each_batch",)

PARALLELISM = {
    "parallelism_config.parallelism_config_dp_replicate_size": Key(
        "Copies of the sharded model; gradients cross between them once a step.",
        "copies",
        1,
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        least=1,
    ),
    "parallelism_config.parallelism_config_dp_shard_size": Key(
        "Processes that one copy is sharded over; best those of one machine.",
        "processes",
        1,
        "PARALLELISM_CONFIG_DP_SHARD_SIZE",
        least=1,
    ),
    "parallelism_config.parallelism_config_cp_size": Key(
        "Context parallelism, which is not offered: leave it at 1.",
        "processes",
        1,
        "PARALLELISM_CONFIG_CP_SIZE",
        least=1,
    ),
    "parallelism_config.parallelism_config_tp_size": Key(
        "Tensor parallelism: processes that each layer is split over. They follow each other and read the same rows; "
        "the rest is data parallelism, of the kind that distributed_type says, over the groups of them.",
        "processes",
        1,
        "PARALLELISM_CONFIG_TP_SIZE",
        least=1,
    ),
    "parallelism_config.parallelism_config_sp_size": Key(
        "Sequence parallelism: processes that each row is split over. Those of a group read the same rows; the rest is "
        "data parallelism, of the kind that distributed_type says, over all processes.",
        "processes",
        1,
        "PARALLELISM_CONFIG_SP_SIZE",
        least=1,
    ),
}

DEEPSPEED = {
    "deepspeed_config.deepspeed_config_file": Key(
        "The DeepSpeed config, a JSON file: beside the launch file, in the folder above, or in the working directory.",
        variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
    ),
    "deepspeed_config.zero3_init_flag": Key(
        "ZeRO-3: cut pretrained weights while they load, so that no process ever holds the whole model.",
        default=True,
        variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
    ),
    "deepspeed_config.deepspeed_multinode_launcher": Key(
        "How several machines are started. `standard`: each starts its own processes; the others need ssh."
    ),
}

KNOWN = {**GENERAL, **FSDP, **PARALLELISM, **DEEPSPEED}

# What follows from both planes, or from this machine.
DERIVED = {
    "backend": ("What runs: single, ddp, fsdp, hsdp, zero1, zero2 or zero3.", ""),
    "accumulation": (
        "Micro-batches that each process adds up for an optimiser step: batch.global_size / (batch.micro_size x "
        "data ranks). A data rank is a process, or a group of sp_size x tp_size processes that read the same rows.",
        "micro-batches",
    ),
    "num_threads": ("CPU threads of each process: cores / processes, unless OMP_NUM_THREADS says.", "threads"),
}

_OFFLOAD = {
    "device": ("Where they rest between uses: cpu, nvme or none.", ""),
    "pin_memory": ("Page-locked host memory: faster copies to a GPU, and it cannot be swapped out.", ""),
    "nvme_path": ("The folder on the disk.", ""),
    "buffer_count": ("Buffers between disk and memory. The optimiser needs one a state: AdamW has four.", "buffers"),
    "buffer_size": ("Size of such a buffer. `auto`: the model's largest parameter and a little more.", "elements"),
    "max_in_cpu": ("What of the parameters stays in host memory rather than on the disk.", "elements"),
}

DS_CONFIG: dict[str, tuple[str, str]] = {
    "train_batch_size": ("Rows an optimiser step, over all processes: the recipe's.", "rows"),
    "train_micro_batch_size_per_gpu": ("Rows in one forward pass of one process: the recipe's.", "rows"),
    "gradient_accumulation_steps": ("Micro-batches an optimiser step and process.", "micro-batches"),
    "gradient_clipping": ("Largest global gradient norm; 0.0 is off. Absent, it would be 1.0 to DeepSpeed.", "norm"),
    "bf16.enabled": ("DeepSpeed's own bf16, with weights in bf16. `auto` takes torch_autocast instead.", ""),
    "fp16.enabled": ("fp16 with loss scaling, if the recipe's precision is fp16.", ""),
    "torch_autocast.enabled": ("bf16 inside operations over fp32 weights, as on every other backend.", ""),
    "torch_autocast.dtype": ("What operations compute in.", ""),
    "torch_autocast.lower_precision_safe_modules": ("Modules whose gradients are summed in bf16 as well.", ""),
    "data_types.grad_accum_dtype": ("What gradients are accumulated in over micro-batches.", ""),
    "communication_data_type": ("What gradients are summed over processes in. bf16 halves traffic, and rounds.", ""),
    "zero_optimization.stage": ("What is cut: 1 optimiser, 2 gradients too, 3 parameters too.", "stage"),
    "zero_optimization.overlap_comm": ("Reduce gradients while the backward pass runs; more buffers.", ""),
    "zero_optimization.contiguous_gradients": ("Copy gradients into one buffer as they come.", ""),
    "zero_optimization.reduce_bucket_size": (
        "Elements that are reduced at a time. `auto`: max(hidden size squared, 1,000,000), once the model is there.",
        "elements",
    ),
    "zero_optimization.allgather_bucket_size": (
        "Elements of updated parameters that are gathered at a time. `auto`: as reduce_bucket_size.",
        "elements",
    ),
    "zero_optimization.stage3_prefetch_bucket_size": (
        "Elements that are gathered ahead of use. `auto`: 0.9 of reduce_bucket_size.",
        "elements",
    ),
    "zero_optimization.stage3_param_persistence_threshold": (
        "Parameters smaller than this stay whole on every process. `auto`: 10 x hidden size, or 0 where those would "
        "be more than 1 % of the model.",
        "elements",
    ),
    **{
        f"zero_optimization.offload_{what}.{key}": text
        for what in ("param", "optimizer")
        for key, text in _OFFLOAD.items()
    },
}

# Variables that act on a run besides keys.
VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "The GPUs that processes see.",
    "OMP_NUM_THREADS": "CPU threads of each process.",
    "TORCH_EXTENSIONS_DIR": "Where native ops are kept once they are compiled.",
    "DS_ACCELERATOR": "The device that DeepSpeed takes.",
    "HF_HOME": "Where the hub's models, data sets and tokens are kept.",
    "HF_HUB_CACHE": "Where the hub's models are kept.",
    "HF_ENDPOINT": "The model hub's address.",
    "HF_HUB_OFFLINE": "If 1, nothing is asked of the model hub: its cache must have it all.",
    "GLOO_SOCKET_IFNAME": "The network interface that gloo uses.",
    "PYTORCH_CUDA_ALLOC_CONF": "How torch allocates GPU memory.",
}
PREFIXES = {
    "NCCL_": "A setting of NCCL, by which GPUs talk to each other.",
    "ACCELERATE_": "A setting of Accelerate.",
    "FSDP_": "A setting of Accelerate for FSDP.",
    "PARALLELISM_CONFIG_": "A setting of Accelerate on how processes are laid out.",
}

OPTIONS = {
    "num_processes": "processes over all machines",
    "machine_rank": "this machine's number, from 0",
    "main_process_ip": "the first machine's address",
    "main_process_port": "a port that is free on it",
    "max_restarts": "how often to start again after a failure",
}
"""The options of `accelerate launch` that can differ from the launch file, or from machine to machine."""

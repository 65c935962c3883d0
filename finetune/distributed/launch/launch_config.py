"""`Launch`: what the launch file and environment ask for, checked before anything is started.

A worker sees the launch file only through environment variables, and some files leave none: `use_cpu: true`
or `distributed_type: 'NO'` with two processes start plain processes that know of nothing. So the launcher's
own command line, which is the parent process's, is read as well, and the two are compared.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from finetune.config.provenance import place_of
from finetune.distributed.launch.deepspeed_file import read_deepspeed_file
from finetune.distributed.launch.launch_file import key_lines, read_launch_file
from finetune.distributed.launch.launch_options import OPTIONS
from finetune.distributed.launch.launch_schema import DeepspeedSection, FsdpSection, LaunchFile, ParallelismSection
from finetune.utils import orphan_watch
from finetune.utils.compat.library_versions import require_installed
from finetune.utils.errors import BackendError
from finetune.utils.platforms import cores
from finetune.utils.quoting import shell_word

# What starts a command several times, and says how often by a variable of its own.
_STARTERS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}


@dataclass(frozen=True)
class Launch:
    """Where and how a run is asked to compute: by the launch file where there is one, else by the environment alone."""

    kind: str
    """single, ddp, fsdp, hsdp, zero1, zero2 or zero3."""
    num_processes: int
    file: str | None = None
    """The launch file as the user named it, or None (torchrun, or a plain `python`)."""
    num_threads: int | None = None
    """CPU threads a process, if the user did not choose: cores / processes on this machine."""
    replicate: int = 1
    """Hybrid shard: copies of the sharded model."""
    sequence: int = 1
    """Sequence parallelism: ranks that each row is split over. For all else they are data-parallel ranks too."""
    tensor: int = 1
    """Tensor parallelism: ranks that each layer is split over. They follow each other, and compute the same rows."""
    units: str = "layers"
    """FSDP2: what is gathered at a time: `layers`, `sized` modules, or the `root`, all but embedding and head."""
    reshard: bool = True
    """FSDP2: weights are freed again between forward and backward."""
    sync_each_batch: bool | None = None
    """FSDP2, with several micro-batches a step: gradients are reduce-scattered after each of them if True, and held
    whole until the last if False. None leaves it to the forecast: whole where that fits."""
    offload_params: str = "none"
    """Where parameters rest: none, cpu or nvme."""
    offload_optimizer: str = "none"
    """Where optimiser state rests: none, cpu or nvme."""
    sharded_init: bool = False
    """ZeRO-3: pretrained weights are sharded while they load."""
    ds_config: dict[str, Any] = field(default_factory=dict)
    """The DeepSpeed configuration as written, `auto` included."""
    ds_place: str = ""
    """Where it is written, for messages."""
    mixed_precision: str = "no"
    """Precision of the launch plane. The recipe decides, so anything but its value is refused; with its value, FSDP
    gathers and computes with copies of the weights in it, instead of casting inside operations."""

    @property
    def place(self) -> str:
        """The launch file, or what stands for it at the start of a message."""
        return self.file or "The launch environment"

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks, that read rows of their own."""
        return self.num_processes // (self.sequence * self.tensor)

    @property
    def averaged_ranks(self) -> int:
        """Ranks, or groups of ranks that share layers, over which gradients are averaged."""
        return self.num_processes // self.tensor

    @property
    def sharded(self) -> bool:
        return self.kind in ("fsdp", "hsdp", "zero3")

    @property
    def cuts_state(self) -> bool:
        """True if a tensor, or what an optimiser keeps for it, may lie on several ranks in parts."""
        return self.sharded or self.uses_deepspeed or self.tensor > 1

    @property
    def flattens(self) -> bool:
        """True if optimisers get parts of flat buffers, in which tensors have lost their shapes."""
        return self.uses_deepspeed

    @property
    def uses_deepspeed(self) -> bool:
        return self.kind.startswith("zero")

    @property
    def library(self) -> str | None:
        """The library that this launch needs and others do not."""
        return "deepspeed" if self.uses_deepspeed else None

    @property
    def uses_fsdp(self) -> bool:
        return self.kind in ("fsdp", "hsdp")

    def holds_whole_gradients(self, accumulation: int) -> bool:
        """Returns True if a rank holds gradients of whole parameters while a step's micro-batches add up."""
        if self.uses_fsdp:
            return accumulation > 1 and not self.sync_each_batch
        return self.kind not in ("zero2", "zero3")

    def defers(self, accumulation: int) -> bool:
        """Returns True if the forecast has to decide when gradients of a step's micro-batches are summed over ranks."""
        return self.uses_fsdp and accumulation > 1 and self.sync_each_batch is None


@dataclass(frozen=True)
class ResolvedConfig:
    """Values that follow from recipe and launch together."""

    precision: str
    """Dtype that the network computes in: fp32, bf16 or fp16."""
    accumulation: int
    """Micro-batches an optimiser step and process."""
    micro_size: int
    """Rows of a micro-batch: at most the recipe's; 1 while that is `auto`."""
    ds_config: dict[str, Any]
    """The DeepSpeed config, completed from the recipe; empty for other backends."""


# The launch file that a process which no launcher of files has started was given itself.
_GIVEN = "FINETUNE_LAUNCH_FILE"


def take_launch_file(file: str) -> None:
    """Has this process, which torchrun or no launcher has started, run as `accelerate launch` with a file has it run.

    Before Accelerate is imported, which reads what is exported here.

    Raises:
        BackendError: If a launch file was read already, or this one cannot be used.
    """
    if orphan_watch.accelerate_arguments() is not None:
        raise BackendError(
            f"--config_file {file} stands behind the script, and the launcher reads what is before it: `finetune "
            f"launch --config_file {shell_word(file)} ...`. Behind the script it is for torchrun."
        )
    written = read_launch_file(file)
    affinity = {"ACCELERATE_CPU_AFFINITY": "1"} if written.enable_cpu_affinity else {}
    os.environ |= {**written.exported(), **affinity, _GIVEN: file}


def read_launch() -> Launch:
    """Reads what was asked for from the launcher's command line, its file, and the environment.

    Raises:
        BackendError: If file and processes contradict each other, or it asks for what is not offered.
    """
    name_deepspeed_device()
    env = dict(os.environ)
    world = number_of(env, "WORLD_SIZE")
    arguments = _launcher_arguments(env, world)
    if arguments is None:
        return launch_of_environment(env, world, None, _threads(None))
    file, exported = arguments.config_file, {}
    if file is not None:
        written = read_launch_file(file)
        options = given_options(arguments)
        check_processes(file, written, options, world, cpu=arguments.cpu)
        exported = written.exported()
        if "nnodes" in options:
            env |= copies_that_fit(env, world)
        # Accelerate reads the section, but exports only what it knows itself.
        env |= {name: value for name, value in exported.items() if name == "FSDP_SYNC_EACH_BATCH"}
    elif (arguments.num_processes or world) != world:
        raise BackendError(
            f"`accelerate launch` asks for {arguments.num_processes} processes, but {world} run: without as many GPUs "
            "it starts one. Name a launch file, such as --config_file accelerate_configs/ddp.yaml."
        )
    if arguments.deepspeed_config_file:
        # Of the command line: it counts from where that was given, not from the launch file.
        env["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = os.path.abspath(arguments.deepspeed_config_file)
        exported |= {"ACCELERATE_DEEPSPEED_CONFIG_FILE": ""}
    return launch_of_environment(env, world, file, _threads(arguments), exported)


def name_deepspeed_device() -> None:
    """Tells DeepSpeed of a CPU; it looks for a GPU as soon as anything imports it, and says at length that it did."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def check_installed(launch: Launch) -> None:
    """Raises a `LibraryVersionError` if the library of a launch is missing, with what to install."""
    if launch.library is not None:
        require_installed(launch.library, f"{launch.place} asks for ZeRO, which")


def launch_of_environment(
    env: Mapping[str, str],
    num_processes: int,
    file: str | None,
    num_threads: int | None = None,
    exported: Collection[str] = (),
) -> Launch:
    """Returns the launch that a worker's environment asks for.

    Args:
        num_processes: Over all machines.
        file: The launch file, which has been checked, if there is one.
        num_threads: See `Launch`.
        exported: The variables that the launch file sets. Others of Accelerate's are left over from elsewhere.

    Raises:
        BackendError: If it contradicts itself, or asks for what is not offered.
    """
    if file is not None:
        _check_left_over(env, file, exported)
    if env.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        raise BackendError(
            f"The environment asks for the dynamo backend {env['ACCELERATE_DYNAMO_BACKEND']}, which is not offered "
            "here: `unset ACCELERATE_DYNAMO_BACKEND`, and set `model.compile: true` in the recipe."
        )
    if file is None and num_processes > 1 and "LOCAL_RANK" not in env:
        raise BackendError(
            f"WORLD_SIZE is {num_processes}, but this process has no LOCAL_RANK: it was not started by a launcher. "
            "Start it with `accelerate launch --config_file accelerate_configs/ddp.yaml`, or unset WORLD_SIZE."
        )
    if _uses(env, "CPU") and (num_processes > 1 or _uses(env, "FSDP") or _uses(env, "DEEPSPEED")):
        raise BackendError(
            "ACCELERATE_USE_CPU is set, which makes Accelerate ignore sharding and offload and start plain CPU "
            "processes. Unset it: without a GPU the same launch files run on gloo by themselves."
        )
    if num_processes == 1:
        check_tasks(env, 1)
    plain = Launch(
        kind="single" if num_processes == 1 else "ddp",
        num_processes=num_processes,
        file=file,
        num_threads=num_threads,
        mixed_precision=env.get("ACCELERATE_MIXED_PRECISION", "no"),
    )
    if _uses(env, "PARALLELISM_CONFIG"):
        plain = _with_layout(env, plain)
    if _uses(env, "DEEPSPEED"):
        return _deepspeed(env, plain)
    return _fsdp(env, plain) if _uses(env, "FSDP") else plain


def _with_layout(env: Mapping[str, str], plain: Launch) -> Launch:
    """Returns the launch with ranks laid out as the section parallelism_config says."""
    source, processes = plain.file or "ACCELERATE_USE_PARALLELISM_CONFIG in the environment", plain.num_processes
    sizes = ParallelismSection.of_environment(env)
    replicate, shard = sizes.parallelism_config_dp_replicate_size, sizes.parallelism_config_dp_shard_size
    sequence, tensor = sizes.parallelism_config_sp_size, sizes.parallelism_config_tp_size
    if (context := sizes.parallelism_config_cp_size) > 1:
        raise BackendError(
            f"{source} asks for context parallelism (cp_size {context}), which is not offered: torch's ring attention "
            "has no kernel for CPUs, and drops the masks that keep documents in a row apart. Leave cp_size at 1, and "
            "set sp_size, which splits rows too."
        )
    if max(replicate, shard) > 1 and not _uses(env, "FSDP"):
        raise BackendError(
            f"{source} sets dp_replicate_size to {replicate} and dp_shard_size to {shard}, which only FSDP reads. Set "
            "distributed_type to FSDP (see accelerate_configs/hsdp.yaml), or leave them at 1."
        )
    if tensor > 1 and _uses(env, "DEEPSPEED"):
        raise BackendError(
            f"{source} asks for tensor parallelism (tp_size {tensor}) under DeepSpeed, which is not offered. Leave "
            "tp_size at 1, or take accelerate_configs/fsdp_tp.yaml."
        )
    if max(sequence, tensor) > 1 and replicate > 1:
        raise BackendError(
            f"{source} asks for {replicate} copies of a sharded model beside sequence or tensor parallelism (sp_size "
            f"{sequence}, tp_size {tensor}), which nothing here has shown to be right together. Leave "
            "dp_replicate_size at 1, or sp_size and tp_size."
        )
    # Without sizes of its own, data parallelism takes what is left.
    split = sequence * tensor
    derived = split > 1 and replicate * shard == 1 and processes % split == 0
    if replicate * shard * split != processes and not derived:
        raise BackendError(
            f"{source} asks for {replicate} copies of {shard} shards, rows split over {sequence} and layers over "
            f"{tensor}, which takes {replicate * shard * split} processes, but {processes} run. Make dp_replicate_size "
            "x dp_shard_size x sp_size x tp_size equal num_processes."
        )
    return replace(plain, replicate=replicate, sequence=sequence, tensor=tensor)


def _uses(env: Mapping[str, str], name: str) -> bool:
    return env.get(f"ACCELERATE_USE_{name}", "").lower() in ("1", "true", "yes", "on")


def number_of(env: Mapping[str, str], name: str) -> int:
    """Returns the whole number from 1 that a variable holds; 1 where it is not set.

    Raises:
        BackendError: If it holds anything else.
    """
    text = env.get(name, "1")
    if not text.strip().isdecimal() or int(text) < 1:
        raise BackendError(
            f"{name} is {text!r} in the environment, not a whole number from 1. `unset {name}`, or correct it."
        )
    return int(text)


def _check_left_over(env: Mapping[str, str], file: str, exported: Collection[str]) -> None:
    """Refuses variables by which workers would hear something else than the launch file says.

    A launcher passes on what it does not set itself, so that a variable of the user's shell reaches workers, and
    looks to them as if the launch file asked for it.
    """
    flags = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")
    acting = [f"ACCELERATE_USE_{flag}" for flag in flags if _uses(env, flag)]
    if env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none").lower() != "none" and _uses(env, "DEEPSPEED"):
        acting.append("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    left_over = [name for name in acting if name not in exported]
    if left_over:
        raise BackendError.of(
            "The launch environment",
            [f"{name} is {env[name]!r} in the environment, which {file} does not ask for" for name in left_over],
            f"Unset what is left over from another launch: `unset {' '.join(left_over)}`. What this launch should do "
            "goes into its launch file.",
        )


def _launcher_arguments(env: Mapping[str, str], world: int) -> Any | None:
    """Returns the parsed command line of the `accelerate launch` that is this process's parent, if it is one.

    With a launch file of its own, it is the command line that would have started as many processes.
    """
    rest = orphan_watch.accelerate_arguments()
    if rest is None and _GIVEN in env:
        rest = ["--config_file", env[_GIVEN], "--num_processes", str(world)]
        rest += ["--main_process_ip", env["MASTER_ADDR"]] if "MASTER_ADDR" in env else []
        rest.append("scripts/train.py")
    if rest is None:
        return None
    from accelerate.commands.config.config_args import default_config_file

    parsed = parse_launch(rest)
    if parsed.config_file is None and os.path.isfile(default_config_file):
        parsed.config_file = default_config_file
    return parsed


def check_tasks(env: Mapping[str, str], machines: int) -> None:
    """Raises a `BackendError` if srun or mpirun has started a command more or less often than a launch has machines."""
    for name, starter in _STARTERS.items():
        if (tasks := number_of(env, name)) not in (1, machines):
            raise BackendError(
                f"{starter} started this command {tasks} times ({name}), and the launch is on {machines} machine(s): "
                "some would wait for others, or each train alone. Start `finetune launch` once on each machine, with a "
                "launch file whose num_machines says how many there are; --print-cluster prints such a job. If these "
                f"are runs of their own, start each by `env -u {name}`."
            )


def refuse_launcher(recipe: str, config: str) -> NoReturn:
    """Raises a `BackendError` for launchers that know no launch file, with the command to take.

    `config` is DeepSpeed's JSON that `--deepspeed` names; "" for none.
    """
    name, keeps = "zero2", ""
    if config:
        section = read_deepspeed_file(config, None)[1].get("zero_optimization")
        name = "zero3" if isinstance(section, dict) and section.get("stage") == 3 else name
        keeps = f" For {config} itself, copy the launch file and name it there as deepspeed_config_file."
    processes = f" --num_processes {os.environ['WORLD_SIZE']}" if "WORLD_SIZE" in os.environ else ""
    raise BackendError(
        "--local_rank and --deepspeed are of the launchers `deepspeed` and torch.distributed.launch. Neither takes "
        "a launch file, so this would train as plain DDP, without ZeRO. Start `finetune launch --config_file "
        f"{name}{processes} {shell_word(recipe)}` on each machine, or take torchrun if DDP is meant.{keeps}"
    )


def parse_launch(words: Sequence[str]) -> Any:
    """Parses the arguments of `accelerate launch`, or of this toolkit's launcher, which takes `--nnodes` as well."""
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.add_argument("--nnodes")
    return parser.parse_args(list(words))


def given_options(parsed: Any) -> dict[str, Any]:
    """Returns the `OPTIONS` that a launcher's command line gives; an empty `rdzv_conf` is Accelerate's default."""
    return {name: value for name in OPTIONS if (value := getattr(parsed, name, None)) not in (None, "")}


def copies_that_fit(env: Mapping[str, str], processes: int) -> dict[str, str]:
    """Returns what an elastic launch changes in a worker's environment: as many copies as the machines have room for.

    Shards and split layers and rows stay as they are.
    """
    sizes = ParallelismSection.of_environment(env)
    copies, one = sizes.parallelism_config_dp_replicate_size, sizes.parallelism_config_dp_shard_size
    one *= sizes.parallelism_config_sp_size * sizes.parallelism_config_tp_size
    if copies == 1 or processes % one:
        return {}
    return {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": str(processes // one)}


def check_processes(
    file: str, written: LaunchFile, options: Mapping[str, Any], world: int, *, cpu: bool = False
) -> None:
    """Compares a launch file with itself and with what started; Accelerate itself falls back or waits without a word.

    Args:
        options: The launcher's, in place of what the file says.
        world: Processes that run.
        cpu: The launcher was given `--cpu`.

    Raises:
        BackendError: If numbers contradict each other, or it would start something else than it says.
    """
    asked = written.model_copy(update=options)
    kind, requested = asked.distributed_type, asked.num_processes or 1
    if (asked.use_cpu or cpu) and (kind != "NO" or requested > 1):
        raise BackendError(
            f"{file} asks for {kind} on {requested} processes and also for `use_cpu` (or --cpu), by which Accelerate "
            "starts unrelated processes. Take `use_cpu` out: without a GPU this file runs on gloo by itself."
        )
    lines = {key: line for key, line in key_lines(file).items() if key not in options}
    problems = [f"{place_of(text.split()[0], file, lines)}: {text}" for text in asked.contradictions()]
    if problems:
        raise BackendError.of(f"The launch file {file}", problems)
    if (machines := asked.elastic_machines) is not None:
        each = requested // asked.num_machines
        requested = min((number * each for number in machines), key=lambda number: abs(number - world))
    if world != requested:
        why = (
            f": WORLD_SIZE is {world} in the environment, left over from another launch. Unset it."
            if kind == "NO"
            else f". Start it with `accelerate launch --config_file {file}`, or give --num_processes {world}."
        )
        raise BackendError(f"{file} asks for {requested} processes, but {world} run{why}")


def _threads(arguments: Any | None) -> int | None:
    """Returns the threads that a process should use, unless the user chose: launchers export one unasked."""
    import psutil

    if arguments is not None and arguments.num_cpu_threads_per_process is not None:
        return None
    launched = arguments is not None and (_GIVEN not in os.environ or "LOCAL_RANK" in os.environ)
    try:
        before = psutil.Process().parent()
        environ = before.environ() if before is not None and launched else dict(os.environ)
    except psutil.Error:
        return None
    return threads_each(environ, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def threads_each(environ: Mapping[str, str], local: int) -> int | None:
    """Returns the threads for each of `local` processes on this machine; None where the user's environment says.

    Raises:
        BackendError: If it says no number, which Accelerate's launcher fails over.
    """
    if "OMP_NUM_THREADS" not in environ:
        return max(1, cores() // local)
    number_of(environ, "OMP_NUM_THREADS")
    return None


def _fsdp(env: Mapping[str, str], plain: Launch) -> Launch:
    source = plain.file or "ACCELERATE_USE_FSDP in the environment"
    asked = FsdpSection.of_environment(env)
    if asked.fsdp_version != 2:
        raise BackendError(
            f"{source} asks for FSDP version {asked.fsdp_version}. Only version 2 is offered (version 1 is deprecated "
            "and keeps no fp32 master weights): set `fsdp_version: 2` under fsdp_config."
        )
    if asked.fsdp_activation_checkpointing:
        raise BackendError(
            f"{source} sets fsdp_activation_checkpointing, which recomputes dropout with another mask and so trains "
            "on wrong gradients. Take it out and set `model.gradient_checkpointing: true` in the recipe."
        )
    offload = "cpu" if asked.fsdp_offload_params else "none"
    return replace(
        plain,
        kind="hsdp" if plain.replicate > 1 else "fsdp",
        units={"TRANSFORMER_BASED_WRAP": "layers", "SIZE_BASED_WRAP": "sized"}.get(
            asked.fsdp_auto_wrap_policy or "NO_WRAP", "root"
        ),
        reshard=asked.fsdp_reshard_after_forward,
        sync_each_batch=None if asked.fsdp_sync_each_batch == "auto" else asked.fsdp_sync_each_batch,
        offload_params=offload,
        offload_optimizer=offload,
    )


def _deepspeed(env: Mapping[str, str], plain: Launch) -> Launch:
    named = plain.file or "ACCELERATE_USE_DEEPSPEED in the environment"
    asked = DeepspeedSection.of_environment(env)
    ds_path = asked.deepspeed_config_file or "none"
    if ds_path.lower() == "none":
        raise BackendError(
            f"{named} asks for DeepSpeed without a deepspeed_config_file; values such as zero_stage in the "
            "launch file itself are not read. Name a JSON file under deepspeed_config, such as ds_configs/zero2.json."
        )
    if plain.mixed_precision != "no":
        raise BackendError(
            f"{named} says mixed_precision: {plain.mixed_precision}, which DeepSpeed takes from its own "
            f"config. Take it out: the recipe's precision decides, and {ds_path} can say how."
        )
    ds_path, config = read_deepspeed_file(ds_path, plain.file)
    section = config.get("zero_optimization")
    section = section if isinstance(section, dict) else {}
    stage = section.get("stage")
    if stage not in (1, 2, 3):
        raise BackendError(
            f"{ds_path} asks for ZeRO stage {stage!r}; offered are 1, 2 and 3 under zero_optimization.stage. For plain "
            "data parallelism use accelerate_configs/ddp.yaml."
        )
    return replace(
        plain,
        kind=f"zero{stage}",
        offload_params=str((section.get("offload_param") or {}).get("device", "none")),
        offload_optimizer=str((section.get("offload_optimizer") or {}).get("device", "none")),
        sharded_init=stage == 3 and asked.zero3_init_flag,
        ds_config=config,
        ds_place=ds_path,
    )

"""The keys of a launch file: type, range, default, meaning, and the environment variable that tells workers of each.

A text within `Annotated` is the key's unit; the alias that a key is written out by is its variable. Defaults, variables
and keys that are not read are those of Accelerate 1.15, `commands/launch.py` and `utils/launch.py`.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AliasGenerator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from finetune.utils.errors import BackendError

From0, From1 = Field(ge=0), Field(ge=1)
WrapPolicy = Literal["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"]
Upper = BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)

FROM_COMMAND_LINE = ("max_restarts", "nnodes", "rdzv_conf")
"""Keys that are no keys of a launch file, but options of the command line alone."""

NOT_FROM_FILE = ("rdzv_backend", "same_network", "enable_cpu_affinity")
"""Keys that Accelerate takes from its own command line alone: it completes only options that are None by themselves."""

# Keys whose variable is set only where the file gives them, or gives another value than the default.
_IF_WRITTEN = ("zero3_init_flag", "fsdp_sync_each_batch")
_IF_CHANGED = ("gpu_ids", "debug")

_OF_TPUS = (
    "main_training_function downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm tpu_env command_file "
    "commands"
)


class LaunchSection(BaseModel):
    """One level of a launch file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
    not_read: ClassVar[Mapping[str, str]] = {}
    """Keys of Accelerate's that are refused, each with the reason."""

    @classmethod
    def of_environment(cls, env: Mapping[str, str]) -> Self:
        """Returns the section as variables give it to workers.

        Raises:
            BackendError: If a variable holds nothing that its key can be.
        """
        variables = {name: key.serialization_alias or "" for name, key in cls.model_fields.items()}
        given = {name: env[variable] for name, variable in variables.items() if variable in env}
        try:
            typed = {name: {"true": True, "false": False}.get(text.lower(), text) for name, text in given.items()}
            return cls.model_validate(typed, strict=False)
        except ValidationError as error:
            problem = error.errors()[0]
            name, wanted = str(problem["loc"][0]), problem["msg"].removeprefix("Input ")
            variable = variables[name]
            raise BackendError(
                f"{variable} is {given[name]!r} in the environment, and {wanted}. `unset {variable}`, or correct it."
            ) from error


class FsdpSection(LaunchSection):
    """The section of FSDP."""

    model_config = ConfigDict(alias_generator=AliasGenerator(serialization_alias=str.upper))
    not_read = {
        "fsdp_sharding_strategy": "fsdp_reshard_after_forward says it",
        "fsdp_backward_prefetch": "version 2 prefetches by itself",
        "fsdp_forward_prefetch": "version 2 has none",
        "fsdp_sync_module_states": "first weights are equal everywhere",
        "fsdp_use_orig_params": "version 2 always does",
        "fsdp_activation_checkpointing_offload": "the recipe's model.gradient_checkpointing recomputes activations",
    }

    fsdp_version: Annotated[int, From1] = 1
    """Only 2 is offered."""
    fsdp_auto_wrap_policy: Annotated[WrapPolicy | None, Upper] = None
    """Unit that is gathered at once. TRANSFORMER_BASED_WRAP: each transformer layer."""
    fsdp_transformer_layer_cls_to_wrap: str | None = Field(
        default=None, serialization_alias="FSDP_TRANSFORMER_CLS_TO_WRAP"
    )
    """The layer class that is a unit; left out: what the model itself names."""
    # Accelerate's default is 1e8, of which a worker then fails to make a whole number.
    fsdp_min_num_params: Annotated[int | None, From1, "parameters"] = None
    """With SIZE_BASED_WRAP: parameters from which a module is a unit."""
    fsdp_reshard_after_forward: bool = True
    """Free a unit's weights after its forward pass and gather them again for the backward pass: least memory. False
    keeps them: a third less communication."""
    # A key of this toolkit's own: Accelerate passes over it, and workers read it off the file.
    fsdp_sync_each_batch: Literal[True, False, "auto"] = "auto"
    """With several micro-batches a step: true reduce-scatters gradients after each of them, which holds least; false
    holds them whole until the last, which sends least; auto: whole where the forecast says that it fits."""
    fsdp_offload_params: bool = False
    """Weights, gradients and optimiser rest in host memory; needs a GPU to compute on."""
    fsdp_cpu_ram_efficient_loading: bool = True
    """Only the first process reads the whole checkpoint into host memory."""
    fsdp_activation_checkpointing: bool = False
    """Refused if true: `model.gradient_checkpointing` of the recipe recomputes with the same dropout masks."""
    fsdp_state_dict_type: Annotated[Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] | None, Upper] = None
    """Read by Accelerate's own checkpoints, which this toolkit does not write."""

    @model_validator(mode="before")
    @classmethod
    def _name_in_full(cls, tree: Any) -> Any:
        """Completes keys as Accelerate does: `version` is `fsdp_version`."""
        return {full_name(key): value for key, value in tree.items()} if isinstance(tree, dict) else tree


def full_name(key: Any) -> str:
    """Returns the name of a key below `fsdp_config`, which may be written without its `fsdp_`."""
    return str(key) if str(key).startswith("fsdp") else f"fsdp_{key}"


class ParallelismSection(LaunchSection):
    """The section on how processes are laid out."""

    model_config = ConfigDict(alias_generator=AliasGenerator(serialization_alias=str.upper))
    not_read = {
        "parallelism_config_pp_size": "pipeline parallelism is not offered",
        **dict.fromkeys(
            ("parallelism_config_cp_backend", "parallelism_config_cp_comm_strategy"),
            "context parallelism is not offered",
        ),
        **{
            f"parallelism_config_sp_{key}": "sequence parallelism is this toolkit's own, which takes sp_size alone"
            for key in ("backend", "seq_length", "seq_length_is_variable", "attn_implementation")
        },
    }

    parallelism_config_dp_replicate_size: Annotated[int, From1, "copies"] = 1
    """Copies of the sharded model; gradients cross between them once a step."""
    parallelism_config_dp_shard_size: Annotated[int, From1, "processes"] = 1
    """Processes that one copy is sharded over; best those of one machine."""
    parallelism_config_cp_size: Annotated[int, From1, "processes"] = 1
    """Context parallelism, which is not offered: leave it at 1."""
    parallelism_config_tp_size: Annotated[int, From1, "processes"] = 1
    """Tensor parallelism: processes that each layer is split over. They follow each other and read the same rows; the
    rest is data parallelism, of the kind that distributed_type says, over the groups of them."""
    parallelism_config_sp_size: Annotated[int, From1, "processes"] = 1
    """Sequence parallelism: processes that each row is split over. Those of a group read the same rows; the rest is
    data parallelism, of the kind that distributed_type says, over all processes."""


class DeepspeedSection(LaunchSection):
    """The section of DeepSpeed."""

    # Accelerate refuses them beside a `deepspeed_config_file`, by a traceback in every worker.
    # Source: accelerate 1.15, `DeepSpeedPlugin._deepspeed_config_checks`.
    not_read = {
        "gradient_accumulation_steps": "the recipe's batch decides",
        "gradient_clipping": "the recipe's optim.clip_norm decides",
        "zero_stage": "zero_optimization.stage of the DeepSpeed config says it",
        "offload_optimizer_device": "zero_optimization.offload_optimizer.device of the DeepSpeed config says it",
        "offload_param_device": "zero_optimization.offload_param.device of the DeepSpeed config says it",
        "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path of the DeepSpeed config says it",
        "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path of the DeepSpeed config says it",
        "zero3_save_16bit_model": "models are written as the recipe's output says",
    }

    deepspeed_config_file: str | None = Field(default=None, serialization_alias="ACCELERATE_DEEPSPEED_CONFIG_FILE")
    """The DeepSpeed config, a JSON file: beside the launch file, in the folder above, or in the working directory."""
    zero3_init_flag: bool = Field(default=True, serialization_alias="ACCELERATE_DEEPSPEED_ZERO3_INIT")
    """ZeRO-3: cut pretrained weights while they load, so that no process ever holds the whole model."""
    deepspeed_multinode_launcher: str | None = None
    """Launcher of several machines. `standard`: each starts its own processes; the others need ssh."""
    deepspeed_hostfile: str | None = None
    """The file that names the machines, for launchers other than `standard`."""
    deepspeed_exclusion_filter: str | None = None
    """Machines or GPUs of the hostfile that are left out, for launchers other than `standard`."""
    deepspeed_inclusion_filter: str | None = None
    """Machines or GPUs of the hostfile that are taken, for launchers other than `standard`."""
    deepspeed_moe_layer_cls_names: str | None = Field(
        default=None, serialization_alias="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"
    )
    """ZeRO-3: classes of mixture-of-experts layers, comma-separated, whose weights are gathered as one."""


class LaunchFile(LaunchSection):
    """The top level of a launch file."""

    not_read = {
        "dynamo_config": "the recipe's model.compile says it",
        "fp8_config": "the recipe's precision decides",
        "megatron_lm_config": "Megatron-LM is not offered",
        "mpirun_config": "starting by mpirun is not offered",
        **dict.fromkeys(_OF_TPUS.split(), "it is for TPUs"),
    }

    compute_environment: Literal["LOCAL_MACHINE"] = "LOCAL_MACHINE"
    """Kind of machines. Only LOCAL_MACHINE is offered."""
    distributed_type: Literal["NO", "MULTI_GPU", "FSDP", "DEEPSPEED"]
    """Parallelism of the processes: NO (one process), MULTI_GPU (DDP), FSDP or DEEPSPEED. Without a GPU all of them run
    on gloo."""
    num_machines: Annotated[int, From1, "machines"] = 1
    """Machines that take part; each runs the same command."""
    num_processes: Annotated[int | None, From1, "processes"] = None
    """Processes over all machines, one a GPU."""
    machine_rank: Annotated[int, From0] = 0
    """This machine's number, from 0."""
    main_process_ip: str | None = None
    """The first machine's address, where all processes meet."""
    main_process_port: Annotated[int, From0, "port"] = 29500
    """A port that is free on the first machine; 0 takes any, on one machine."""
    rdzv_backend: str = "static"
    """Rendezvous, by which launchers of several machines find each other."""
    same_network: bool = False
    """All machines see the first one by `main_process_ip`."""
    max_restarts: Annotated[int, From0, "restarts"] = 0
    """Times that the launcher starts all processes again after a failure. An option of the command line alone."""
    nnodes: str | None = None
    """Machines of an elastic launch, as `least:most`: it starts once the least have come, goes on with those that are
    left, and takes in those that come. `num_processes` / `num_machines` run on each. An option of the command line
    alone."""
    rdzv_conf: str | None = None
    """Settings of an elastic launch's rendezvous, such as `last_call_timeout=30`. An option of the command line
    alone."""
    mixed_precision: str = Field(default="no", serialization_alias="ACCELERATE_MIXED_PRECISION")
    """The recipe's `precision` decides. With its value here, FSDP gathers and computes with copies of the weights in 16
    bit, instead of casting inside operations."""
    use_cpu: bool = False
    """Leave it out: true makes Accelerate drop sharding and start unrelated processes."""
    debug: bool = Field(default=False, serialization_alias="ACCELERATE_DEBUG_MODE")
    """Accelerate checks shapes before each collective."""
    gpu_ids: str = Field(default="all", serialization_alias="CUDA_VISIBLE_DEVICES")
    """The GPUs that are used, by number, or all."""
    enable_cpu_affinity: bool = False
    """Bind each process to the cores near its GPU."""
    fsdp_config: FsdpSection = FsdpSection()
    deepspeed_config: DeepspeedSection = DeepspeedSection()
    parallelism_config: ParallelismSection = ParallelismSection()

    @model_validator(mode="before")
    @classmethod
    def _drop_what_says_nothing(cls, tree: Any) -> Any:
        """Drops empty sections, `null` where Accelerate has a default, and keys for TPUs that are off."""
        nulls = cls.model_fields.keys() - {"num_machines", "machine_rank"}
        return {
            key: value
            for key, value in tree.items()
            if not (value is None and key in nulls)
            and not (key in SECTIONS and not value)
            and not (key in cls.not_read and _is_off(value))
        }

    def sections(self) -> dict[str, LaunchSection]:
        """Returns the levels that a launch of this type reads, each by the prefix of its keys."""
        names = [
            n for n in SECTIONS_OF[self.distributed_type] if n != "parallelism_config" or n in self.model_fields_set
        ]
        return {"": self, **{f"{name}.": getattr(self, name) for name in names}}

    def exported(self) -> dict[str, str]:
        """Returns the variables that `accelerate launch` exports for this file, of those that this toolkit reads."""
        variables = {}
        if self.distributed_type == "NO":
            variables["ACCELERATE_USE_CPU"] = str(self.use_cpu)
        elif self.distributed_type != "MULTI_GPU":
            variables[f"ACCELERATE_USE_{self.distributed_type}"] = "true"
        if "parallelism_config." in self.sections():
            variables["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        for section in self.sections().values():
            for name, field in type(section).model_fields.items():
                value, variable = getattr(section, name), field.serialization_alias
                silent = (name in _IF_WRITTEN and name not in section.model_fields_set) or (
                    name in _IF_CHANGED and value == field.default
                )
                if variable is not None and value is not None and not silent:
                    variables[variable] = str(value).lower() if isinstance(value, bool) else str(value)
        return variables

    @property
    def elastic_machines(self) -> range | None:
        """The numbers of machines that an elastic launch may have; None for other launches, and if they are none."""
        least, _, most = (self.nnodes or "").partition(":")
        most = most or least
        if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
            return None
        return range(int(least), int(most) + 1)

    def contradictions(self) -> Iterator[str]:
        """Yields values that would have processes wait for ever, or start others; each text begins with its key."""
        processes, machines, port = self.num_processes or 1, self.num_machines, self.main_process_port
        if self.distributed_type == "NO":
            for name, number in (("num_processes", processes), ("num_machines", machines)):
                if number > 1:
                    yield f"{name} is {number}, and distributed_type 'NO' starts one process. Take MULTI_GPU"
        elif processes % machines:
            yield f"num_processes is {processes} over num_machines {machines}. Make it a multiple of num_machines"
        if (rank := self.machine_rank) >= machines:
            yield f"machine_rank is {rank}, and num_machines is {machines}: ranks are from 0 to {machines - 1}"
        if port > 65535:
            yield f"main_process_port is {port}, and ports end at 65535. Take one that is free on the first machine"
        if self.nnodes is not None and self.elastic_machines is None:
            yield f"nnodes is {self.nnodes}. Give the least and the most machines, such as 1:2"
        if self.nnodes is not None and self.distributed_type == "NO":
            yield f"nnodes is {self.nnodes}, and distributed_type 'NO' starts one process. Take MULTI_GPU"
        if self.nnodes is not None and not (self.main_process_ip and port):
            yield (
                f"nnodes is {self.nnodes}, and the machines must know where they meet. Run `finetune rendezvous` on a "
                "host that outlives them, and give --main_process_ip and --main_process_port as it says"
            )
        if self.nnodes is None and self.rdzv_conf is not None:
            yield f"rdzv_conf is {self.rdzv_conf}, which only an elastic launch reads. Give --nnodes too"
        if machines > 1 and port == 0 and self.nnodes is None:
            yield f"main_process_port is 0, any that is free, and {machines} machines must know it. Name one"
        if machines > 1 and self.distributed_type != "NO" and not self.main_process_ip and self.nnodes is None:
            yield f"num_machines is {machines}, and main_process_ip is missing. Give the first machine's address there"
        named = self.deepspeed_config.deepspeed_multinode_launcher
        if machines > 1 and self.distributed_type == "DEEPSPEED" and named != "standard":
            yield (
                f"deepspeed_config.deepspeed_multinode_launcher is {named or 'missing, which is pdsh'}, and "
                f"num_machines is {machines}: processes would start from one machine over ssh. Set it to standard, "
                "and start the same command on each machine"
            )
        if self.gpu_ids != "all" and len(self.gpu_ids.split(",")) < (local := processes // machines):
            yield f"gpu_ids is {self.gpu_ids}, and {local} processes run on a machine. Name as many, or `all`"


SECTIONS: dict[str, type[LaunchSection]] = {
    "fsdp_config": FsdpSection,
    "deepspeed_config": DeepspeedSection,
    "parallelism_config": ParallelismSection,
}
SECTIONS_OF = {
    "NO": (),
    "MULTI_GPU": ("parallelism_config",),
    "FSDP": ("fsdp_config", "parallelism_config"),
    "DEEPSPEED": ("deepspeed_config", "parallelism_config"),
}
"""The sections that a `distributed_type` reads."""


def fields_of(sections: Mapping[str, LaunchSection | type[LaunchSection]]) -> dict[str, FieldInfo]:
    """Returns the dotted keys of sections, which are given by their prefixes."""
    return {
        f"{prefix}{name}": field
        for prefix, section in sections.items()
        for name, field in section.model_fields.items()
        if name not in SECTIONS
    }


KEYS = fields_of({"": LaunchFile, **{f"{name}.": section for name, section in SECTIONS.items()}})
"""Every key, dotted."""


def least_of(field: FieldInfo) -> int | None:
    """Returns the smallest number that a key can have; None if it takes no number."""
    return next((rule.ge for rule in field.metadata if hasattr(rule, "ge")), None)


def _is_off(value: Any) -> bool:
    """Returns True if a section or key that is not read asks for nothing; `accelerate config` writes such ones."""
    if isinstance(value, dict):
        return all(map(_is_off, value.values()))
    return not value or str(value).lower() in ("no", "main")

"""Uses the private names that no short run reaches, by what `utils/compat` promises of them.

For tests/versions/smoke.py, which launches it as `private_names_worker.py CHECK FOLDER`; a check that fails raises.
"""

import importlib
import os
import sys
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version
from recipes_for_tests import LLAMA
from torch import distributed, nn
from torch.utils import cpp_extension
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from finetune.checkpoint.run_fingerprint import depends_on_micro_size
from finetune.distributed import native_ops
from finetune.distributed.state import zero_state
from finetune.distributed.strategies import strategy
from finetune.models import attention
from finetune.models.build_network import init_weights
from finetune.utils import exit_codes
from finetune.utils.compat import peft_private, torch_private, transformers_private
from finetune.utils.compat.datasets_private import fingerprint

TORCH = Version(torch.__version__).release


# Asks to be started again, once.
WORKER = """
import sys
from pathlib import Path

starts = Path(sys.argv[1])
starts.write_text(starts.read_text() + "x")
sys.exit(75 if starts.read_text() == "x" else 0)
"""


def llama(**config: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**{**LLAMA, "vocab_size": 32, "num_hidden_layers": 1, **config}))


def optimizers(folder: Path) -> None:
    """A fused optimiser skips a step by itself until it is told not to; a loss scale is kept whole."""
    fused = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    assert torch_private.skips_nonfinite_steps(fused)
    assert not torch_private.skips_nonfinite_steps(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    torch_private.never_skip_steps(fused)
    assert not torch_private.skips_nonfinite_steps(fused)
    accelerator = SimpleNamespace(scaler=torch.amp.GradScaler("cpu"))
    strategy.set_scaler_state(accelerator, {"scale": 8.0, "good_steps": 3})
    assert strategy.scaler_state(accelerator) == {"scale": 8.0, "good_steps": 3}


def modules(folder: Path) -> None:
    """What depends on how a batch is cut is known by its class."""
    assert depends_on_micro_size(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert depends_on_micro_size(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    assert not depends_on_micro_size(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.0)))


def compiled(folder: Path) -> None:
    before = torch_private.num_compiled_graphs()
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))
    assert torch_private.num_compiled_graphs() == before + 1


def processor(folder: Path) -> None:
    """bf16 is multiplied by oneDNN wherever it says so; that attention takes groups depends on torch alone."""
    left, right = (torch.randn(16, 16, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    if torch_private.cpu_has_bf16():
        product = torch.ops.mkldnn._linear_pointwise(left.bfloat16(), right.bfloat16(), None, "none", [], "")
        torch.testing.assert_close(product.float(), left @ right.T, rtol=2e-2, atol=2e-2)
    assert torch_private.varlen_takes_groups() is (TORCH >= (2, 12))
    assert torch_private.reduces_unused_gradients() is (TORCH >= (2, 12))


def builds(folder: Path) -> None:
    """A lock that torch holds is seen, and one that nobody holds is only where torch does not use the kernel's."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
    lock = native_ops.build_folder("shm_comm") / "lock"
    module: Any = cpp_extension
    if torch_private.builds_under_flock():
        held = module.FileLock(lock)
        held.acquire()
    else:
        held = module.FileBaton(str(lock))
        assert held.try_acquire()
    assert native_ops.is_locked("shm_comm")
    held.release()
    assert not native_ops.is_locked("shm_comm")
    lock.touch()
    assert native_ops.is_locked("shm_comm") is not torch_private.builds_under_flock()


def collectives(folder: Path) -> None:
    """A process's collectives are recorded, and its store can be asked; gloo listens where it is told to."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch_private.start_gloo_with_one_worker()
    assert torch_private.last_collective() == (0, "")
    with torch_private.prefixed_rendezvous("attempt"):
        distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    assert torch_private.gloo_worker_threads() == 1
    distributed.all_reduce(torch.ones(3))
    number, words = torch_private.last_collective()
    assert number == 1
    assert "gloo:all_reduce of [[3]]" in words
    exit_codes._wait_for_others()
    assert torch_private.default_store().get("finetune/left/0") == b"1"


def elastic(folder: Path) -> None:
    """Workers that ask to be started again count as no failure; a machine leaves a rendezvous at once."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    starts = folder / "starts"
    starts.write_text("")
    (folder / "worker.py").write_text(WORKER)
    here = {"rdzv_backend": "c10d", "rdzv_endpoint": "127.0.0.1:0", "run_id": "smoke"}
    once = LaunchConfig(1, 1, 1, max_restarts=0, monitor_interval=0.02, **here)
    machines = []

    def note(handler: Any) -> None:
        machines.append(len(torch_private.rendezvous_state(handler).participants))

    with torch_private.no_failure(75, note):
        elastic_launch(once, sys.executable)("-S", str(folder / "worker.py"), str(starts))
    assert starts.read_text() == "xx"
    assert machines == [1]

    parameters = RendezvousParameters("c10d", "127.0.0.1:0", "left", 1, 1, is_host="true", join_timeout="60")
    backend, store = create_backend(parameters)
    handler = create_handler(store, backend, parameters)
    handler.next_rendezvous()
    assert len(torch_private.rendezvous_state(handler).participants) == 1
    torch_private.leave_rendezvous(handler)
    assert len(torch_private.rendezvous_state(handler).participants) == 0


def rows(folder: Path) -> None:
    """The same rows have the same fingerprint, and others another."""
    import datasets

    made = {number: datasets.Dataset.from_dict({"text": ["one", "two", str(number)]}) for number in (3, 4)}
    for number, dataset in made.items():
        dataset.save_to_disk(folder / str(number))
    opened = [fingerprint(datasets.load_from_disk(folder / name)) for name in ("3", "3", "4")]
    assert opened[0] == opened[1] != opened[2]


def adapters(folder: Path) -> None:
    """peft does without bitsandbytes while adapters are attached, and finds it afterwards."""
    from peft import LoraConfig, get_peft_model

    known: Any = importlib.import_module("peft.import_utils")
    if find_spec("bitsandbytes") is None:
        return
    # As in a process that has not imported it; a second import could not be.
    loaded = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "bitsandbytes"}
    known.is_bnb_available.cache_clear()
    known.is_bnb_4bit_available.cache_clear()
    with peft_private.without_bitsandbytes():
        assert not known.is_bnb_available()
        attached = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    assert any("lora_A" in name for name, _ in attached.named_parameters())
    assert "bitsandbytes" not in sys.modules
    sys.modules.update(loaded)
    assert known.is_bnb_available()
    assert known.is_bnb_4bit_available()


def without_adapters(folder: Path) -> None:
    """A network computes as if it had no adapters, which stay trained, and with them again."""
    from peft import LoraConfig, get_peft_model

    network, ids = llama(), torch.arange(6)[None]
    plain = network(ids).logits
    attached = get_peft_model(network, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    adapted = attached(ids).logits
    assert not torch.equal(adapted, plain)
    with peft_private.adapters_off(attached):
        assert torch.equal(attached(ids).logits, plain)
        assert all(p.requires_grad for name, p in attached.named_parameters() if ".lora_" in name)
    assert torch.equal(attached(ids).logits, adapted)


def networks(folder: Path) -> None:
    """A tie that is undone stays undone; first weights are drawn anew for a network without any."""
    network = llama(tie_word_embeddings=True)
    assert transformers_private.tied_names(type(network)) == {"lm_head.weight": "model.embed_tokens.weight"}
    transformers_private.untie(network, ["lm_head.weight"])
    network.tie_weights()
    assert network.lm_head.weight is not network.model.embed_tokens.weight
    torch.testing.assert_close(network.lm_head.weight, network.model.embed_tokens.weight)
    assert transformers_private.tied_names(type(network)), "the class ties as before"
    with torch.device("meta"):
        bare = llama()
    filled = [init_weights(bare, seed).state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(filled[0][name], tensor) for name, tensor in filled[1].items())
    assert not all(torch.equal(filled[0][name], tensor) for name, tensor in filled[2].items())
    assert attention.choose_attention("auto", bare.config, AutoModelForCausalLM, told=True) == attention.NAME


class Disk:
    """In place of what swaps state to NVMe, which takes minutes to compile: it counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def is_swappable_tensor(self, tensor: Any, numel: int | None = None) -> bool:
        return True

    def swap_in_optimizer_state(self, parameter: Any, async_parameter: Any = None) -> None:
        self.asked.append("in")

    def swap_out_optimizer_state(self, parameter: Any, async_swap: bool) -> None:
        self.asked.append("out")

    def release_swap_buffers(self, parameter: Any) -> None:
        self.asked.append("release")


def swaps(folder: Path) -> None:
    """ZeRO-3's state is read from the disk, and written there if it has changed; offload says which optimiser steps."""
    import deepspeed

    native_ops.prepare_environment()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch_private.start_gloo_with_one_worker()
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    }
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    engine, zero, *_ = deepspeed.initialize(
        model=network, optimizer=torch.optim.AdamW(network.parameters(), lr=0.1), config=config
    )
    wrapped = SimpleNamespace(optimizer=zero)  # as Accelerate does
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    zero.swap_optimizer, zero.optimizer_swapper = True, (disk := Disk())
    zero.next_swappable_fp32_partitioned_groups = [None] * len(zero.fp16_groups)
    held = {key: piece.gather() for key, piece in zero_state.read_state(wrapped, network)}
    assert {key.partition("/")[0] for key in held} == {"parameter", "exp_avg", "exp_avg_sq", "step"}
    assert disk.asked == ["in", "release"] * (len(disk.asked) // 2) != []
    disk.asked.clear()
    zero_state.write_state(wrapped, network, list(held), lambda key: 2 * held[key] if held[key].ndim else held[key])
    assert disk.asked == ["in", "out"] * (len(disk.asked) // 2) != []
    for key, piece in zero_state.read_state(wrapped, network):
        torch.testing.assert_close(piece.gather(), 2 * held[key] if held[key].ndim else held[key], rtol=0, atol=0)
    distributed.destroy_process_group()


_ALL = (
    optimizers,
    modules,
    compiled,
    processor,
    builds,
    collectives,
    elastic,
    rows,
    adapters,
    without_adapters,
    networks,
    swaps,
)
CHECKS = {check.__name__: check for check in _ALL}

if __name__ == "__main__":
    CHECKS[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)

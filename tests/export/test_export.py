"""What is written is whole, or says what is missing."""

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.config.recipe_schema import Recipe
from finetune.export import save_model
from finetune.export.verify_export import tensors_of
from finetune.models import pretrained_files
from finetune.models.build_network import build_meta_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.heads import NEXT_TOKEN
from finetune.utils.errors import CheckpointError


class OneProcess:
    """The part of a backend that writing needs."""

    is_main = True

    def __init__(self, without: str = "") -> None:
        self.without = without
        self.gathered = 0
        self.most = 0
        """Bytes of gathered tensors that were alive at once."""

    def full_parameters(self, network: torch.nn.Module, *, trained_only: bool = False):
        alive: list[weakref.ref[torch.Tensor]] = []
        for name, parameter in network.named_parameters():
            if name != self.without:
                whole = parameter.detach().clone()
                alive.append(weakref.ref(whole))
                self.gathered += 1
                self.most = max(self.most, sum(one.nbytes for each in alive if (one := each()) is not None))
                yield name, whole
                del whole

    def broadcast_object(self, value: object) -> object:
        return value


def tiny(model_type: str = "llama", **sizes: int) -> Any:
    sizes |= {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 32} if model_type != "gpt2" else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


def save(network: Any, directory: Path, without: str = "", backend: OneProcess | None = None) -> None:
    skeleton = build_meta_model(network.config, NEXT_TOKEN, Recipe())
    save_model.save_model(backend or OneProcess(without), ForwardWrapper(network), skeleton, None, directory)  # type: ignore[arg-type]


def test_what_was_written_opens_with_the_same_scores(tmp_path: Path) -> None:
    network = tiny().eval()
    save(network, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(8)[None]
    assert torch.equal(network(ids).logits, again(ids).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_missing_tensor_is_named_and_the_old_model_stays(tmp_path: Path) -> None:
    network = tiny()
    save(network, tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match=r"^The gathered weights do not fit .*missing \['lm_head.weight'\]"):
        save(tiny(), tmp_path / "model", without="lm_head.weight")
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*file/model"):
        save(tiny(), tmp_path / "file" / "model")


CONFIGS: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "gpt2"},  # ties its ends
    {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},  # its files hold experts one by one
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["model_type"])
@pytest.mark.parametrize(("size", "files"), [(5 * 10**9, 1), (4096, 3), (1, 3)])
def test_files_are_those_of_save_pretrained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], size: int, files: int
) -> None:
    """Compared with what transformers writes of the same network, and never more than a file's worth in memory."""
    monkeypatch.setattr(save_model, "_FILE_BYTES", size)
    network = tiny(**config)
    largest = max(parameter.nbytes for parameter in network.parameters())
    backend = OneProcess()
    save(network, tmp_path / "model", backend=backend)
    network.save_pretrained(tmp_path / "theirs")
    found, theirs = dict(tensors_of(tmp_path / "model")), dict(tensors_of(tmp_path / "theirs"))
    assert found.keys() == theirs.keys()
    assert all(torch.equal(found[name], theirs[name]) for name in theirs)
    others = {path.name for path in (tmp_path / "theirs").iterdir()} - {"model.safetensors"}
    assert others <= {path.name for path in (tmp_path / "model").iterdir()}
    ours, other = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "theirs"))
    assert ours == other
    assert len(list((tmp_path / "model").glob("*.safetensors"))) >= files
    assert backend.most <= max(size, largest) + 2 * largest
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    ids = torch.arange(8)[None]
    assert torch.equal(network.eval()(ids).logits, again(ids).logits)


def test_files_whose_tensors_are_made_of_several_are_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []

    def merges(network: PreTrainedModel, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts.append(len(state))
        norms = [state.pop(name) for name in list(state) if "norm" in name]
        return {**state, **({"norms": torch.cat(norms)} if norms else {})}

    monkeypatch.setattr(pretrained_files, "as_written", merges)
    monkeypatch.setattr(save_model, "as_written", merges)
    network = tiny()
    save(network, tmp_path / "model")
    assert parts[-1] == len(list(network.parameters()))
    norms = [parameter for name, parameter in network.named_parameters() if "norm" in name]
    assert torch.equal(load_file(tmp_path / "model" / "model.safetensors")["norms"], torch.cat(norms))


def test_a_full_disk_takes_no_rank_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others gather to the end, whatever rank 0 has met: so it gathers with them."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save_model, "_FILE_BYTES", 1)
    monkeypatch.setattr(save_model, "save_file", full)
    backend = OneProcess()
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tiny(), tmp_path / "model", backend=backend)
    assert backend.gathered == len(list(tiny().parameters()))


def test_files_that_are_not_what_is_in_memory_never_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips on the way to the disk, and a network whose ends are two beside a configuration that has one."""

    def flips(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
        save_file(tensors, file, metadata)

    with monkeypatch.context() as patched:
        patched.setattr(save_model, "save_file", flips)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not what the network has in memory"):
            save(tiny(), tmp_path / "model")
    parted = tiny()
    parted.config.tie_word_embeddings = True
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is a tensor of its own, and its configuration ties it"):
        save(parted, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    # Of adapters and of networks of one's own likewise.
    save_model.check_written(tmp_path, {})
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    save_model.check_written(tmp_path, {"a": torch.ones(2)})
    for expected in (
        {"a": torch.ones(2).half()},
        {"a": torch.ones(1, 2)},
        {},
        {"a": torch.ones(2), "b": torch.ones(1)},
    ):
        with pytest.raises(CheckpointError, match="is not the network that was trained"):
            save_model.check_written(tmp_path, expected)

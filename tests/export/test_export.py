"""What is written is whole, or says what is missing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from finetune.export import save_model
from finetune.models.forward_wrapper import ForwardWrapper
from finetune.models.networks import build_meta_model
from finetune.utils.errors import CheckpointError


class OneProcess:
    """The part of a backend that writing needs."""

    is_main = True

    def __init__(self, without: str = "") -> None:
        self.without = without

    def full_parameters(self, network: torch.nn.Module, *, trained_only: bool = False):
        for name, parameter in network.named_parameters():
            if name != self.without:
                yield name, parameter.detach().clone()

    def tell(self, value: object) -> object:
        return value


def tiny() -> torch.nn.Module:
    config = AutoConfig.for_model(
        "llama", hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    return AutoModelForCausalLM.from_config(config)


def save(network: torch.nn.Module, directory: Path, without: str = "") -> None:
    skeleton = build_meta_model(network.config, "causal_lm")
    save_model.save_model(OneProcess(without), ForwardWrapper(network), skeleton, None, directory)  # type: ignore[arg-type]


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


def test_files_that_are_not_what_is_in_memory_never_get_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit that flips on the way to the disk, and a network whose ends are two beside a configuration that has one."""
    written = PreTrainedModel.save_pretrained

    def flips(self: PreTrainedModel, folder: Path, **options: object) -> None:
        written(self, folder, **options)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"].view(torch.int32)[3] ^= 1
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedModel, "save_pretrained", flips)
        with pytest.raises(CheckpointError, match=r"model\.norm\.weight is not what the network has in memory"):
            save(tiny(), tmp_path / "model")
    parted = tiny()
    parted.config.tie_word_embeddings = True
    with pytest.raises(CheckpointError, match=r"it lacks lm_head\.weight"):
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

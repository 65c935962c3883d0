"""What is written is whole, or says what is missing."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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

"""Documents that share a row are attended each by itself, without a mask of all pairs, in every architecture."""

from typing import Any

import pytest
import torch
from recipes_for_tests import ARCHITECTURES, base
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.models import attention
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.causal_lm import CAUSAL_LM

LENGTHS = (13, 40, 14)
WIDTH = sum(LENGTHS)
_SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
# A window that is narrower than the longest document, and without layers that see all.
MISTRAL = base(model={"config": {"model_type": "mistral", **_SMALL, "num_key_value_heads": 2, "sliding_window": 16}})
DECODERS = {
    **{
        name: ARCHITECTURES[name] for name in ("llama_tied", "llama_checkpointed", "gpt2", "qwen3", "gemma3", "mixtral")
    },
    "mistral": MISTRAL,
    "lora": base(lora={"rank": 4}),
}


def network_of(job: dict[str, Any], kernel: str) -> torch.nn.Module:
    model = {**job["model"], "attention": kernel}
    # Random masks would differ between ways to compute the same.
    model["config"] = (
        {**model["config"], **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)}
        if (model["config"]["model_type"] == "gpt2")
        else {**model["config"], "attention_dropout": 0.0}
    )
    recipe = validate_recipe({**job, "model": model})
    return build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)


def batch() -> dict[str, torch.Tensor]:
    """Two rows, the second with its documents in another order."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 512, (2, WIDTH), generator=generator)
    rows = (LENGTHS, LENGTHS[::-1])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])
    cu_seqlens = torch.tensor([0, *(n for row in rows for n in row)]).cumsum(0).to(torch.int32)
    return {"input_ids": ids, "targets": ids.roll(-1, 1), "position_ids": positions, "cu_seqlens": cu_seqlens}


def learn(network: torch.nn.Module) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = CAUSAL_LM.loss_sum(network, batch())
    loss.backward()
    return loss, {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


class Pairs(TorchDispatchMode):
    """Notes tensors that have an element for each pair of tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.shape[-2:] == (WIDTH, WIDTH):
                self.seen.add(str(func))
        return out


@pytest.mark.parametrize("name", list(DECODERS))
def test_packed_attention_is_the_masked_one(name: str) -> None:
    """Loss and gradients are those of a mask of all pairs, and no such mask is made."""
    packed, masked = (network_of(DECODERS[name], kernel) for kernel in ("auto", "sdpa"))
    with Pairs() as pairs:
        loss, gradients = learn(packed)
    assert not pairs.seen
    with Pairs() as pairs:
        wanted, expected = learn(masked)
    assert pairs.seen, "the test would not see a mask"
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5 * float(expected[key].abs().max() + 1))


def test_a_wrong_edge_is_seen() -> None:
    network = network_of(DECODERS["llama_tied"], "auto")
    moved = batch()
    moved["cu_seqlens"][1] += 1
    loss, wrong = (CAUSAL_LM.loss_sum(network, b) for b in (batch(), moved))
    assert abs(wrong - loss) / loss > 1e-5


def test_a_gpu_without_a_kernel_gets_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mistral", "llama_tied"):
        wanted = learn(network_of(DECODERS[name], "sdpa"))[0]
        with monkeypatch.context() as patch:
            patch.setattr(attention, "_has_kernel", lambda query, value, dropout: False)
            found = learn(network_of(DECODERS[name], "auto"))[0]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


def test_without_edges_it_is_plain_attention() -> None:
    """As in samples, and in tasks of one's own."""
    network = network_of(DECODERS["mistral"], "packed")
    masked = network_of(DECODERS["mistral"], "sdpa")
    ids = batch()["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(network(input_ids=ids).logits, masked(input_ids=ids).logits)


class Reads(TorchDispatchMode):
    """Counts reads of a tensor's value by the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DECODERS)
def test_rows_of_one_document_are_not_searched_for_more(name: str) -> None:
    """transformers would look at positions, and wait for the device; the result is that of its own attention."""
    rows = {key: value[:, :31] for key, value in batch().items() if key in ("input_ids", "targets")}
    found = []
    for kernel in ("auto", "sdpa"):
        network = network_of(DECODERS[name], kernel)
        with Reads() as reads:
            loss = CAUSAL_LM.loss_sum(network, rows)
        loss.backward()
        found.append((reads.count, loss, {n: p.grad for n, p in network.named_parameters() if p.grad is not None}))
    (ours, loss, gradients), (theirs, wanted, others) = found
    # What is no wider than a window needs no mask; else transformers makes one.
    assert theirs > 0
    assert ours == theirs if name == "mistral" else ours < theirs
    assert torch.equal(loss, wanted)
    for key, gradient in others.items():
        assert torch.equal(gradients[key], gradient), key


@pytest.mark.parametrize(
    ("model_type", "sizes", "expected"),
    [
        ("llama", {}, "packed"),
        ("gemma2", {}, "eager"),
        ("llama4_text", {"attention_chunk_size": 8}, "sdpa"),
        ("bloom", {}, "eager"),
    ],
)
def test_architectures_that_cannot_are_given_what_they_can(
    model_type: str, sizes: dict[str, Any], expected: str
) -> None:
    config = AutoConfig.for_model(model_type, **sizes)
    assert attention.choose_attention("auto", config, AutoModelForCausalLM, told=True) == expected
    assert attention.choose_attention("auto", config, AutoModelForCausalLM, told=False) == expected.replace(
        "packed", "sdpa"
    )
    assert attention.choose_attention("eager", config, AutoModelForCausalLM, told=True) == "eager"


def test_nothing_of_it_is_written(tmp_path: Any) -> None:
    network: Any = network_of(DECODERS["llama_tied"], "auto")
    assert network.config._attn_implementation == "packed"
    network.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("takes_groups", [True, False])
def test_the_kernel_is_given_groups_as_it_takes_them(monkeypatch: pytest.MonkeyPatch, takes_groups: bool) -> None:
    """Torch 2.11's has no word for fewer heads of keys than of queries."""
    told: list[bool] = []

    def kernel(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor,
        *_: object,
        **options: object,
    ) -> torch.Tensor:
        told.append("enable_gqa" in options)
        assert takes_groups or query.shape[1] == key.shape[1]
        return attention._by_document((query, key, value), cu_seqlens, 0.0, None, None)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "varlen_takes_groups", lambda: takes_groups)
    torch.manual_seed(0)
    query, key, value = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    cu_seqlens = torch.tensor([0, 4, 9])
    found = attention._by_kernel((query, key, value), cu_seqlens, 5, None, None)
    expected = attention._by_document((query, key, value), cu_seqlens, 0.0, None, None)
    assert torch.allclose(found, expected)
    assert told == [takes_groups]

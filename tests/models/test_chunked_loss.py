"""The loss that a head computes in chunks is the loss of all logits, and so are its gradients."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from recipes_for_tests import base
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from finetune.config.recipe import validate_recipe
from finetune.models import chunked_loss, frozen_weights
from finetune.models.build_network import build_model
from finetune.models.heads import NEXT_TOKEN
from finetune.models.model_config import resolve_model_config
from finetune.tasks.causal_lm import CAUSAL_LM, causal_lm_logits, token_losses

N, H, V = 150, 24, 300


def exact(hidden: torch.Tensor, weight: torch.Tensor, bias: Any, targets: torch.Tensor) -> list[torch.Tensor]:
    """Loss and gradients in fp64."""
    given = [t.detach().double().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    logits = given[0] @ given[1].T + (given[2] if len(given) > 2 else 0)
    value = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    return [value, *torch.autograd.grad(value, given)]


def case(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator).requires_grad_()
    weight = torch.randn(V, H, generator=generator).mul(0.3).requires_grad_()
    bias = torch.randn(V, generator=generator).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::7] = -100
    return hidden, weight, bias, targets


@pytest.mark.parametrize("rows", [1, 37, 64, N], ids="{} rows".format)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
def test_gradients_are_those_of_fp64(
    rows: int, dtype: torch.dtype, tolerance: float, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda tokens, vocabulary: rows)
    hidden, weight, bias, targets = case()
    given = [hidden, weight, bias] if biased else [hidden, weight]
    value = chunked_loss.loss_of(hidden, weight, bias if biased else None, targets, dtype)
    assert value.dtype == torch.float32
    (value * 0.5).backward()
    wanted = exact(hidden, weight, bias if biased else None, targets)
    assert abs(value.item() - wanted[0].item()) / wanted[0].item() < tolerance
    for tensor, gradient in zip(given, wanted[1:], strict=True):
        assert tensor.grad is not None
        error = (2 * tensor.grad.double() - gradient).norm() / gradient.norm()
        assert error < tolerance, f"{tuple(tensor.shape)}: {error:.1e}"


def divergence(logits: torch.Tensor, targets: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """An objective: the distance of probabilities from others, and a figure."""
    logs = logits.log_softmax(-1)
    far = ((logs.exp() - other) ** 2).sum(-1) - logs.gather(-1, targets[:, None])[:, 0]
    return torch.stack((far, logs.detach().amax(-1)), dim=1)


@pytest.mark.parametrize("per_token", [False, True], ids=["sum", "tokens"])
@pytest.mark.parametrize("head", ["product", "any"])
def test_an_objective_of_logits(head: str, per_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values and gradients in chunks are those of all logits; and only the first value has any."""
    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda tokens, vocabulary: 37)
    given, factors = case(), torch.linspace(-2, 3, N)[:, None]
    objective = chunked_loss.Objective(divergence, (torch.rand(N, V).softmax(-1),))

    def values(chunked: bool) -> list[torch.Tensor]:
        hidden, weight, bias, targets = (t.detach().requires_grad_(t.is_floating_point()) for t in given)
        if not chunked:
            found = chunked_loss.plain_loss(hidden @ weight.T + bias, targets, objective=objective, per_token=per_token)
        elif head == "any":

            def logits(x: torch.Tensor) -> torch.Tensor:
                return x @ weight.T + bias

            found = chunked_loss._of_any_head(
                logits, hidden, targets, objective=objective, per_token=per_token, label_smoothing=0.0
            )
        else:
            compute = chunked_loss.token_losses if per_token else chunked_loss.loss_of
            found = compute(hidden, weight, bias, targets, torch.float32, objective=objective)
        learned = (found[..., 0] * factors[:, 0]).sum() if per_token else found[0] * 0.5
        return [found, *torch.autograd.grad(learned, (hidden, weight, bias))]

    for found, wanted in zip(values(True), values(False), strict=True):
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert values(True)[0].shape == ((N, 2) if per_token else (2,))


@pytest.mark.parametrize("rows", [37, N], ids="{} rows".format)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)], ids=["fp32", "bf16"])
def test_losses_of_tokens_that_count_for_different_amounts(
    rows: int, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda tokens, vocabulary: rows)
    hidden, weight, bias, targets = case()
    factors = torch.linspace(-2, 3, N)
    losses = chunked_loss.token_losses(hidden, weight, bias, targets, dtype)
    (losses * factors).sum().backward()
    given = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    logits = given[0] @ given[1].T + given[2]
    wanted = nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="none")
    (wanted * factors).sum().backward()
    assert not losses[targets == -100].any()
    assert (losses.double() - wanted).norm() < tolerance * wanted.norm()
    for tensor, exactly in zip((hidden, weight, bias), given, strict=True):
        assert tensor.grad is not None
        assert exactly.grad is not None
        assert (tensor.grad.double() - exactly.grad).norm() < tolerance * exactly.grad.norm()


@pytest.mark.parametrize("per_token", [False, True], ids=["", "tokens"])
def test_labels_are_smoothed_over_the_vocabulary(per_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without all logits: loss and gradients are those of fp64."""
    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda tokens, vocabulary: 37)
    hidden, weight, bias, targets = case()
    compute = chunked_loss.token_losses if per_token else chunked_loss.loss_of
    value = compute(hidden, weight, bias, targets, torch.float32, label_smoothing=0.2).sum()
    value.backward()
    given = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    logits = given[0] @ given[1].T + given[2]
    wanted = nn.functional.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2)
    wanted.backward()
    assert value.item() == pytest.approx(wanted.item(), rel=1e-6)
    for tensor, exactly in zip((hidden, weight, bias), given, strict=True):
        assert tensor.grad is not None
        assert exactly.grad is not None
        assert (tensor.grad.double() - exactly.grad).norm() < 1e-6 * exactly.grad.norm()


@pytest.mark.parametrize("trained", [0, 1])
def test_only_what_is_trained_gets_a_gradient(trained: int) -> None:
    given = list(case())
    given[1 - trained] = given[1 - trained].detach()
    value = chunked_loss.loss_of(given[0], given[1], None, given[3], torch.float32)
    value.backward()
    assert given[trained].grad is not None
    assert given[1 - trained].grad is None


def test_gradients_are_handed_on_and_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a head: as much memory as its weight. The loss is still there, as it is in the loop."""
    made: list[int] = []

    def one_pass(*given: Any, real: Any = chunked_loss._one_pass) -> Any:
        value, gradients = real(*given)
        made.extend(gradient.data_ptr() for gradient in gradients)
        return value, gradients

    monkeypatch.setattr(chunked_loss, "_one_pass", one_pass)
    hidden, weight, bias, targets = case()
    value = chunked_loss.loss_of(hidden, weight, bias, targets, torch.float32)
    (value * 0.5).backward(retain_graph=True)
    assert [t.grad.data_ptr() for t in (hidden, weight, bias) if t.grad is not None] == made
    with pytest.raises(RuntimeError, match="before"):
        value.backward()


def test_nothing_to_learn_is_nought() -> None:
    hidden, weight, _, targets = case()
    value = chunked_loss.loss_of(hidden, weight, None, torch.full_like(targets, -100), torch.float32)
    value.backward()
    assert value.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_scores_far_apart_stay_finite() -> None:
    """A target whose probability is beyond fp32's smallest number."""
    hidden, weight, _, targets = case()
    value = chunked_loss.loss_of(hidden * 1000, weight, None, targets, torch.float32)
    assert value.isfinite()
    assert value.item() == pytest.approx(exact(hidden * 1000, weight, None, targets)[0].item(), rel=1e-5)


class Logits(TorchDispatchMode):
    """The largest tensor whose last side is the vocabulary, in rows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[-1] == 512:
                self.rows = max(self.rows, value.numel() // 512)
        return out


BATCH = 3  # whose tokens are not as many as the vocabulary has pieces


def learn(network: nn.Module, *, per_token: bool = False) -> tuple[float, dict[str, torch.Tensor], int]:
    ids = torch.randint(0, 512, (BATCH, 128), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "targets": ids.roll(-1, 1)}
    with Logits() as logits:
        if per_token:
            value = (token_losses(network, batch) * torch.linspace(-1, 1, 128)).sum()
        else:
            value = CAUSAL_LM.loss_sum(network, batch)
        value.backward()
    return value.item(), {n: p.grad for n, p in network.named_parameters() if p.grad is not None}, logits.rows


def built(kind: str, way: str) -> nn.Module:
    """A network whose head is of some kind, the same weights each time."""
    config = {**base()["model"]["config"], "tie_word_embeddings": kind == "tied"}
    lora = {"lora": {"rank": 4, "save_modules": ["lm_head"]}} if kind == "saved whole" else {}
    recipe = validate_recipe(base(model={"config": config, "loss": way}, **lora))
    network: Any = build_model(recipe, resolve_model_config(recipe, vocab_size=512), NEXT_TOKEN)
    if kind == "adapted":
        if way == "chunked":
            chunked_loss.unfuse_loss(network)
        torch.manual_seed(0)
        network = get_peft_model(
            network, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
        )
        if way == "chunked":
            chunked_loss.fuse_loss(network.get_base_model())
    if kind == "stored":
        network.lm_head.requires_grad_(False)
        frozen_weights.cast_frozen(network, torch.bfloat16)
    return network.train()


@pytest.mark.parametrize("per_token", [False, True], ids=["", "of each token"])
@pytest.mark.parametrize("kind", ["plain", "tied", "saved whole", "adapted", "stored"])
def test_every_head_learns_what_logits_teach(kind: str, per_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "rows_of_chunk", lambda tokens, vocabulary: 100)
    value, gradients, rows = learn(built(kind, "chunked"), per_token=per_token)
    wanted, expected, all_rows = learn(built(kind, "plain"), per_token=per_token)
    assert (rows, all_rows) == (100, BATCH * 128), "logits of one chunk at a time"
    assert value == pytest.approx(wanted, rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max()))


def test_evaluation_and_samples_pass_through_the_same_head() -> None:
    network = built("plain", "chunked").eval()
    ids = torch.arange(20)[None]
    with torch.no_grad():
        value = CAUSAL_LM.loss_sum(network, {"input_ids": ids, "targets": ids.roll(-1, 1)})
        logits = causal_lm_logits(network, {"input_ids": ids})
    assert logits.shape == (1, 20, 512)
    assert value.item() == pytest.approx(chunked_loss.plain_loss(logits, ids.roll(-1, 1)).item(), rel=1e-6)


def test_no_view_leaves_a_module() -> None:
    """Of which FSDP2 warns, on every rank, since its hooks do not survive what is done to one in place."""
    network: Any = built("plain", "chunked")
    head, ids = chunked_loss.loss_head(network), torch.arange(20)[None]
    assert head is not None
    head.targets = ids.roll(-1, 1).flatten()
    assert not head(torch.rand(1, 20, network.config.hidden_size))._is_view()
    head.targets = None
    assert not CAUSAL_LM.loss_sum(network, {"input_ids": ids, "targets": ids.roll(-1, 1)})._is_view()


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("cohere", {"logit_scale": 0.5}),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 30.0}),
    ],
)
def test_changed_logits_are_left_alone(model_type: str, sizes: dict[str, Any]) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "vocab_size": 512, "head_dim": 8, "pad_token_id": 0}
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **small, **sizes))
    chunked_loss.fuse_loss(network)
    assert chunked_loss.loss_head(network) is None


def test_fp16_keeps_the_order_that_loss_scaling_needs() -> None:
    """Small gradients would be zero before the scale reaches them: chunks go through autograd."""
    hidden, weight, _, targets = case()
    head = nn.Linear(H, V, bias=False, dtype=torch.float16)
    head.weight.data.copy_(weight)
    fused = chunked_loss.LossHead(head)
    fused.targets = targets[1:2]
    small = hidden[None, 1:2].half().detach().requires_grad_()
    scale = 1e-6
    (fused(small).squeeze() * scale * 2.0**16).backward()
    assert small.grad is not None
    assert small.grad.any()

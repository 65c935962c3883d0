"""Every objective against a formula that is written another way, in fp64, and what must hold for all of them."""

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from plain_preferences import Labelled, both_answers, train_dpo, train_kto
from plain_preferences import Pair as PlainPair
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.config.preference_losses import LOSSES, READ_BY, SORTED_LOSSES, problems
from finetune.config.recipe import validate_recipe
from finetune.config.recipe_schema import PreferenceSection
from finetune.data.rows.kinds.answer_pairs import preference_form
from finetune.tasks.preferences.objectives import (
    Pair,
    answer_figures,
    aot_loss,
    baseline,
    centering,
    distillation,
    divergence_scores,
    kto,
    log1mexp,
    orpo,
    pair_loss,
    policy_weights,
    reward,
    smoothed,
    window_values,
    with_rest,
    without_reference,
)
from finetune.tasks.preferences.pairs import _sft
from finetune.tasks.task_lookup import BUILT_IN
from finetune.utils.errors import RecipeError
from finetune.utils.import_object import import_object

Floats = NDArray[np.float64]
BETA, SMOOTHING, TAU, ALPHA = 0.3, 0.1, 0.05, 0.7
KEYS: dict[str, Any] = {"beta": BETA, "label_smoothing": SMOOTHING, "discopop_tau": TAU}
WILD = st.floats(-1e3, 1e3, width=32)


def nls(x: Any) -> Any:
    """-log sigmoid(x)."""
    return np.logaddexp(0, -x)


def sg(x: Any) -> Any:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


# Losses by the chosen and the rejected log ratio and the numbers of tokens, as the papers have them.
FORMULAS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "sigmoid": lambda w, r, n, m: nls(BETA * (w - r)),
    "hinge": lambda w, r, n, m: np.maximum(0, 1 - BETA * (w - r)),
    "ipo": lambda w, r, n, m: (w / n - r / m - 1 / (2 * BETA)) ** 2,
    "sigmoid_norm": lambda w, r, n, m: nls(BETA * (w / n - r / m)),
    "robust": lambda w, r, n, m: (
        ((1 - SMOOTHING) * nls(BETA * (w - r)) - SMOOTHING * nls(BETA * (r - w))) / (1 - 2 * SMOOTHING)
    ),
    "exo_pair": lambda w, r, n, m: (
        sg(BETA * (w - r)) * (-nls(BETA * (w - r)) - np.log(1 - SMOOTHING))
        + sg(BETA * (r - w)) * (-nls(BETA * (r - w)) - np.log(SMOOTHING))
    ),
    "nca_pair": lambda w, r, n, m: nls(BETA * w) + (nls(-BETA * w) + nls(-BETA * r)) / 2,
    "bco_pair": lambda w, r, n, m: nls(BETA * w) + nls(-BETA * r),
    "sppo_hard": lambda w, r, n, m: (w - 1 / (2 * BETA)) ** 2 + (r + 1 / (2 * BETA)) ** 2,
    "apo_zero": lambda w, r, n, m: 1 - sg(BETA * w) + sg(BETA * r),
    "apo_down": lambda w, r, n, m: sg(BETA * w) + 1 - sg(BETA * (w - r)),
    "discopop": lambda w, r, n, m: (
        (1 - sg(BETA * (w - r) / TAU)) * nls(BETA * (w - r)) + np.exp(-nls(BETA * (w - r) / TAU) - BETA * (w - r))
    ),
}


def pair(chosen: Any, rejected: Any, dtype: torch.dtype = torch.float32) -> Pair:
    return Pair(*(torch.as_tensor(np.asarray(x), dtype=dtype) for x in (chosen, rejected)))


def drawn(pairs: int = 6, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Pair, Pair, Pair]:
    """Sums of a policy and of its reference, and numbers of tokens."""
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 9, (2, pairs))
    reference = -random.gamma(2.0, 3.0, (2, pairs))
    policy = reference + random.normal(0, 4, (2, pairs))
    return pair(*policy, dtype=dtype), pair(*reference, dtype=dtype), pair(*tokens, dtype=dtype)


def test_the_names_are_those_of_dpo() -> None:
    assert {*FORMULAS, *SORTED_LOSSES, "sft"} == {*LOSSES["dpo"]}
    policy, reference, tokens = drawn()
    window, rows = window_values(policy, reference), torch.arange(6)
    for name in LOSSES["dpo"]:
        assert pair_loss(name, policy, reference, tokens, window=window, rows=rows, **KEYS).shape == (6,)
    for name in ("orpo", "aot"):
        with pytest.raises(ValueError, match=f"no loss {name} of a pair"):
            pair_loss(name, policy, reference, tokens, **KEYS)


@pytest.mark.parametrize("name", FORMULAS)
@given(w=WILD, r=WILD, n=st.integers(1, 4000), m=st.integers(1, 4000))
def test_a_loss_of_any_pair(name: str, w: float, r: float, n: int, m: int) -> None:
    policy = pair([w], [r])
    for half in policy:
        half.requires_grad_()
    loss = pair_loss(name, policy, pair([0.0], [0.0]), pair([n], [m]), **KEYS)
    assert loss.dtype == torch.float32
    w, r, n, m = (np.float64(x) for x in (w, r, n, m))
    np.testing.assert_allclose(loss.detach().numpy()[0], FORMULAS[name](w, r, n, m), rtol=2e-5, atol=2e-5)
    loss.sum().backward()
    assert all(half.grad is not None and bool(half.grad.isfinite()) for half in policy)


@pytest.mark.parametrize("name", FORMULAS)
def test_gradients_and_the_reference(name: str) -> None:
    policy, reference, tokens = drawn()

    def loss(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        return pair_loss(name, Pair(chosen, rejected), reference, tokens, **KEYS)

    # The difference of sums alone counts, whatever both models say of the answer.
    moved = pair_loss(name, *(Pair(p.chosen - 7, p.rejected + 2) for p in (policy, reference)), tokens, **KEYS)
    torch.testing.assert_close(loss(*policy), moved)
    assert torch.autograd.gradcheck(loss, tuple(half.clone().requires_grad_() for half in policy))


def test_what_papers_say_of_losses() -> None:
    policy, reference, tokens = drawn()
    one = torch.zeros(1)
    same = pair_loss("sigmoid", *[Pair(one, one)] * 3)
    assert same.item() == pytest.approx(math.log(2))

    def of(name: str, flipped: bool = False) -> torch.Tensor:
        args = [Pair(p.rejected, p.chosen) if flipped else p for p in (policy, reference, tokens)]
        return pair_loss(name, *args, **KEYS)

    # The robust loss of labels of which a share is flipped has the mean of the loss of right ones.
    torch.testing.assert_close((1 - SMOOTHING) * of("robust") + SMOOTHING * of("robust", flipped=True), of("sigmoid"))
    torch.testing.assert_close(of("sft"), -policy.chosen)
    # KL(q || p) is 0 where q = p.
    margin = math.log((1 - SMOOTHING) / SMOOTHING) / BETA
    zero = pair_loss("exo_pair", pair([margin], [0.0]), pair([0.0], [0.0]), tokens, **KEYS)
    assert zero.item() == pytest.approx(0, abs=1e-6)


F_PRIME: dict[str, Callable[[Floats], Floats]] = {
    "reverse_kl": lambda t: np.log(t),
    "forward_kl": lambda t: 1 - 1 / t,
    "js_divergence": lambda t: np.log(2 * t / (1 + t)),
    "alpha_divergence": lambda t: (t ** (ALPHA - 1) - 1) / (ALPHA - 1),
}


@pytest.mark.parametrize("divergence", F_PRIME)
def test_f_divergences(divergence: str) -> None:
    ratios = np.linspace(-30, 30, 61)
    scores = divergence_scores(pair(ratios, -ratios, torch.float64), divergence, ALPHA)
    assert bool((scores.chosen.diff() > 0).all())
    beyond = torch.tensor([-1e3, -999.0], requires_grad=True)  # there, too, a better answer has a higher score
    gradient = torch.autograd.grad(divergence_scores(Pair(beyond, beyond), divergence, -1.0).chosen.sum(), beyond)[0]
    assert bool(((gradient >= 1) & gradient.isfinite()).all())
    np.testing.assert_allclose(scores.chosen.numpy(), F_PRIME[divergence](np.exp(ratios)), rtol=1e-12)
    np.testing.assert_allclose(scores.rejected.numpy(), F_PRIME[divergence](np.exp(-ratios)), rtol=1e-12)
    policy, reference, tokens = drawn()
    got = pair_loss("hinge", policy, reference, tokens, beta=BETA, f_divergence=divergence, f_alpha=ALPHA)
    w, r = (F_PRIME[divergence](np.exp(half.numpy())) for half in policy.minus(reference))
    np.testing.assert_allclose(got.numpy(), np.maximum(0, 1 - BETA * (w - r)), rtol=1e-9)


@pytest.mark.parametrize(("alpha", "name"), [(1.0, "reverse_kl"), (1 + 1e-9, "reverse_kl"), (0.0, "forward_kl")])
def test_alpha_divergence_has_two_others_as_ends(alpha: float, name: str) -> None:
    ratios = pair([-3.0, 0.25], [2.0, 0.0])
    for half, other in zip(
        divergence_scores(ratios, "alpha_divergence", alpha), divergence_scores(ratios, name), strict=True
    ):
        torch.testing.assert_close(half, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "discopop"])
@pytest.mark.parametrize("divergence", F_PRIME)
@given(w=WILD, r=WILD, alpha=st.floats(-2, 3))
@settings(max_examples=30)
def test_f_divergences_of_any_pair_are_finite(name: str, divergence: str, w: float, r: float, alpha: float) -> None:
    policy = pair([w], [r])
    for half in policy:
        half.requires_grad_()
    loss = pair_loss(name, policy, pair([0.0], [0.0]), pair([1], [1]), **KEYS, f_divergence=divergence, f_alpha=alpha)
    loss.sum().backward()
    assert bool(loss.isfinite())
    assert all(half.grad is not None and bool(half.grad.isfinite()) for half in policy)


def test_weights_of_pairs() -> None:
    """exp of the mean over tokens of log p_t - log sum_v p_v^2, of both answers."""
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(size=(2, 5, 11)))  # two answers of 5 and of 3 tokens
    written = torch.from_numpy(random.integers(0, 11, (2, 5)))
    p = logits.softmax(-1)
    ratio = p.gather(-1, written[..., None])[..., 0] / (p**2).sum(-1)
    lengths = ((0, 5), (1, 3))
    aligned = [ratio[row, :n].log().sum().item() for row, n in lengths]
    weight = policy_weights(pair(*([one] for one in aligned)), pair([5.0], [3.0]))
    wanted = math.prod(ratio[row, :n].prod().item() ** (1 / n) for row, n in lengths)
    assert weight.item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("name", SORTED_LOSSES)
@pytest.mark.parametrize("ties", [False, True])
def test_sorted_losses_are_those_of_the_global_batch_however_it_is_split(name: str, ties: bool) -> None:
    policy, reference, tokens = drawn(12)
    if ties:
        policy = Pair(policy.chosen.round(), reference.rejected.clone())
        reference = Pair(reference.chosen.round(), reference.rejected)
    leaves = Pair(*(half.clone().requires_grad_() for half in policy))
    if name == "aot":
        first, second = leaves.margin.sort().values, reference.margin.sort().values
    else:
        first, second = (half.sort().values for half in leaves.minus(reference))
    whole = smoothed(BETA * (first - second), SMOOTHING).sum()
    wanted = torch.autograd.grad(whole, leaves)
    if ties:
        wanted = tuple(
            gradient.sum() for gradient in wanted
        )  # which of two equal ones a sort takes first is its own affair

    # Other ranks have other pairs, in another order of their own.
    window = window_values(leaves, reference)
    assert not window.requires_grad
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for sizes in ([12], [6, 6], [1] * 12, [5, 4, 3]):
        total = torch.zeros((), dtype=torch.float64)
        for rows in order.split(sizes):
            micro, other = (Pair(p.chosen[rows], p.rejected[rows]) for p in (leaves, reference))
            total = total + pair_loss(name, micro, other, tokens, window=window, rows=rows, **KEYS).sum()
        torch.testing.assert_close(total, whole)
        got = torch.autograd.grad(total, leaves)
        torch.testing.assert_close(tuple(g.sum() for g in got) if ties else got, wanted)


@given(values=st.lists(st.tuples(WILD, WILD, WILD, WILD), min_size=1, max_size=8), paired=st.booleans())
def test_sorted_losses_of_any_batch_are_finite(values: list[tuple[float, ...]], paired: bool) -> None:
    columns = torch.tensor(values).T
    policy, reference = Pair(*columns[:2].clone().requires_grad_().unbind()), Pair(*columns[2:])
    window, rows = window_values(policy, reference), torch.arange(len(values))
    loss = aot_loss(policy, reference, window, rows, BETA, SMOOTHING, paired=paired)
    gradients = torch.autograd.grad(loss.sum(), policy)
    assert bool(loss.isfinite().all())
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)


@given(st.floats(-1e3, -1e-6))
def test_log1mexp(x: float) -> None:
    got = log1mexp(torch.tensor([x]))
    np.testing.assert_allclose(got.numpy()[0], np.log(-np.expm1(np.float64(np.float32(x)))), rtol=2e-6, atol=1e-12)


def test_a_certain_answer_has_finite_odds() -> None:
    means = torch.tensor([0.0, -1e-9, -(2.0**-24), -1e-3, -1e3], requires_grad=True)
    loss, log_odds = orpo(Pair(means, means.flip(0)), pair([1.0] * 5, [1.0] * 5), 0.1)
    loss.sum().backward()
    assert means.grad is not None
    assert bool(means.grad.isfinite().all())
    assert bool(loss.isfinite().all() & log_odds.isfinite().all())


def test_losses_without_a_reference() -> None:
    policy, _, tokens = drawn()
    policy = Pair(-policy.chosen.abs() - 0.1, -policy.rejected.abs() - 0.1)
    w, r = (half.numpy() for half in policy.over(tokens))
    odds = [np.exp(mean) / (1 - np.exp(mean)) for mean in (w, r)]
    loss, log_odds = orpo(policy, tokens, BETA)
    np.testing.assert_allclose(log_odds.numpy(), np.log(odds[0] / odds[1]), rtol=1e-9)
    np.testing.assert_allclose(loss.numpy(), BETA * np.log(1 + odds[1] / odds[0]), rtol=1e-9)

    simpo = without_reference(policy.over(tokens), 2.0, gamma=0.5, label_smoothing=SMOOTHING)
    x = 2 * (w - r) - 0.5
    np.testing.assert_allclose(simpo.numpy(), (1 - SMOOTHING) * nls(x) + SMOOTHING * nls(-x), rtol=1e-9)
    torch.testing.assert_close(
        without_reference(policy, BETA), pair_loss("sigmoid", policy, Pair(*[torch.zeros(6)] * 2), tokens, beta=BETA)
    )
    arguments = tuple(half.clone().requires_grad_() for half in policy)
    assert torch.autograd.gradcheck(lambda *halves: orpo(Pair(*halves), tokens, BETA)[0], arguments)


def test_rewards() -> None:
    scores = pair([2.0, -1.0], [0.5, -1.0])
    np.testing.assert_allclose(reward(scores).numpy(), [math.log(1 + math.exp(-1.5)), math.log(2)], rtol=1e-6)
    margins = reward(scores, torch.tensor([1.5, -1.0])).numpy()
    np.testing.assert_allclose(margins, [math.log(2), math.log(1 + math.exp(-1))], rtol=1e-6)
    assert centering(scores).tolist() == [6.25, 4.0]


@given(st.lists(st.tuples(WILD, st.booleans()), min_size=1, max_size=8), WILD)
def test_kto(answers: list[tuple[float, bool]], z: float) -> None:
    ratios = torch.tensor([r for r, _ in answers], requires_grad=True)
    desirable = torch.tensor([good for _, good in answers])
    loss = kto(ratios, desirable, torch.tensor(z), BETA, (1.5, 0.5))
    loss.sum().backward()
    wanted = [1.5 * (1 - sg(BETA * (r - z))) if good else 0.5 * (1 - sg(BETA * (z - r))) for r, good in answers]
    np.testing.assert_allclose(loss.detach().numpy(), wanted, rtol=1e-4, atol=1e-6)
    assert ratios.grad is not None
    assert bool(ratios.grad.isfinite().all())
    # Without a baseline it is the paired loss of both kinds, a half each.
    halves = pair_loss(
        "apo_zero", *([Pair(ratios.detach(), ratios.detach())]), pair(*[[0.0] * len(answers)] * 2), pair([1], [1])
    )
    both = kto(ratios, desirable, 0.0, 0.1, (1.0, 1.0)) + kto(ratios, ~desirable, 0.0, 0.1, (1.0, 1.0))
    torch.testing.assert_close(both.detach(), halves)


def test_the_baseline_is_not_negative_and_has_no_gradient() -> None:
    window = torch.tensor([1.0, 4.0, -2.0], requires_grad=True)
    assert baseline(window).item() == 1.0
    assert not baseline(window).requires_grad
    assert baseline(-window).item() == 0.0


def logs(seed: int, tokens: int = 4, outcomes: int = 9) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (tokens, outcomes))).log_softmax(-1)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_distillation(beta: float) -> None:
    student, teacher = logs(0), logs(1)
    s, t = student.exp().numpy(), teacher.exp().numpy()
    m = beta * t + (1 - beta) * s

    def kl(p: Floats, q: Floats) -> Any:
        return (p * np.log(p / q)).sum(-1)

    wanted = kl(t, s) if beta == 0 else kl(s, t) if beta == 1 else beta * kl(t, m) + (1 - beta) * kl(s, m)
    np.testing.assert_allclose(distillation(student, teacher, beta).numpy(), wanted, rtol=1e-9)
    np.testing.assert_allclose(distillation(student, student, beta).numpy(), 0, atol=1e-12)
    assert torch.autograd.gradcheck(lambda x: distillation(x.log_softmax(-1), teacher, beta), student.requires_grad_())


@given(
    beta=st.sampled_from([0.0, 0.2, 0.5, 1.0]), scale=st.floats(0, 1e3), seed=st.integers(0, 99), masked=st.booleans()
)
def test_distillation_of_anything_is_finite(beta: float, scale: float, seed: int, masked: bool) -> None:
    logits = (logs(seed) * scale).float().requires_grad_()
    teacher = (logs(seed + 1) * scale).float()
    if masked:
        teacher[:, 2:4] = -math.inf
    loss = distillation(logits.log_softmax(-1), teacher.log_softmax(-1), beta)
    loss.sum().backward()
    assert logits.grad is not None
    assert bool(loss.isfinite().all() & logits.grad.isfinite().all())
    assert loss.min() > -1e-4


@pytest.mark.parametrize("k", [1, 4, 9])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_stored_outcomes_and_the_rest(k: int, beta: float) -> None:
    student, teacher = logs(2), logs(3)
    best, index = teacher.topk(k)
    rest = with_rest(best)
    np.testing.assert_allclose(rest.exp().sum(-1).numpy(), 1, atol=1e-6)
    joined = distillation(with_rest(student.gather(-1, index)), rest, beta)
    whole = distillation(student, teacher, beta)
    assert bool((joined <= whole + 1e-6).all())
    if k == 9:
        torch.testing.assert_close(joined, whole, rtol=1e-4, atol=1e-5)
    # Rounded to fewer digits, they may add up to more than 1.
    assert bool(with_rest(best + 1e-2).isfinite().all())


def test_figures_are_sums_and_counts() -> None:
    labels = torch.tensor([True, False, True])
    single = answer_figures(torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([0.5, 1.0, 2.0]), labels)
    assert {name: (total.item(), count.item()) for name, (total, count) in single.items()} == {
        "rewards/chosen": (2.5, 2),
        "rewards/rejected": (1.0, 1),
        "logps/chosen": (-5.0, 2),
        "logps/rejected": (-2.0, 1),
    }


@pytest.mark.parametrize(
    ("task", "keys", "said"),
    [
        ("dpo", {"beta": 0.0}, "preference.beta is 0.0; it is a number above 0"),
        ("dpo", {"beta": math.nan}, "preference.beta is nan"),
        ("dpo", {"loss": ["robust"], "label_smoothing": 0.5}, "label_smoothing is 0.5; it is from 0 to below 0.5"),
        ("dpo", {"loss": ["exo_pair"]}, "label_smoothing is 0, of which exo_pair takes the logarithm"),
        (
            "dpo",
            {"label_smoothing": 0.1},
            "label_smoothing is 0.1, and sigmoid does not take it: of the losses of dpo, rob",
        ),
        ("dpo", {"loss": ["kto"]}, "aot, aot_unpaired; kto is one of task kto"),
        ("dpo", {"loss": []}, "it names at least one loss, and each once"),
        ("dpo", {"loss": ["ipo", "ipo"], "loss_weights": [1, 1]}, "it names at least one loss, and each once"),
        ("dpo", {"loss": ["ipo", "sft"], "loss_weights": [1]}, "it has a number above 0 for each of ['ipo', 'sft']"),
        ("dpo", {"loss_weights": [-1.0]}, "loss_weights is [-1.0]"),
        (
            "dpo",
            {"loss": ["aot"], "f_divergence": "forward_kl"},
            "f_divergence is forward_kl, and aot has reverse_kl alone",
        ),
        (
            "dpo",
            {"f_divergence": "forward_kl", "loss": ["sft"]},
            "f_divergence is forward_kl, and sft does not take it",
        ),
        ("dpo", {"f_divergence": "forward_kl", "f_alpha": 0.2}, "f_alpha is 0.2, and f_divergence forward_kl does not"),
        ("dpo", {"loss": ["discopop"], "discopop_tau": 1.0}, "discopop_tau is 1.0; it is above 0 and below 1"),
        ("dpo", {"discopop_tau": 0.1}, "discopop_tau is 0.1, and sigmoid does not take it: of the losses of dpo, disc"),
        ("dpo", {"label_smoothing": 0.1}, "cDPO; `robust` is its unbiased form"),
        ("dpo", {"ld_alpha": 1.5}, "ld_alpha is 1.5; it is from 0 to 1"),
        ("kto", {"undesirable_weight": 0}, "undesirable_weight is 0; it is a number above 0"),
        ("kto", {"loss": ["sigmoid"]}, "preference.loss names sigmoid; task kto has kto, apo_zero_unpaired"),
        ("orpo", {"loss": ["sigmoid"]}, "task orpo has one loss, and no such key"),
        ("reward", {"centering": -0.1}, "centering is -0.1"),
        ("simpo", {"gamma": -1}, "gamma is -1; it is a number from 0 on"),
        ("simpo", {"use_weighting": True}, "use_weighting is no key of task simpo; it is one of dpo"),
        (
            "dpo",
            {"use_weighting": True, "loss": ["ipo", "aot"], "loss_weights": [1, 1]},
            "aot compares pairs with those",
        ),
    ],
)
def test_bad_hyperparameters(task: str, keys: dict[str, Any], said: str) -> None:
    (problem,) = problems(task, keys)
    assert said in problem


@pytest.mark.parametrize(
    ("task", "keys"),
    [
        *((task, {}) for task in ("dpo", "kto", "orpo", "simpo", "cpo", "reward")),
        (
            "dpo",
            {"loss": ["sigmoid", "sft"], "loss_weights": [1.0, 0.2], "f_divergence": "js_divergence"},
        ),
        ("dpo", {"loss": ["aot", "robust"], "label_smoothing": 0.4}),
        ("cpo", {"label_smoothing": 0.1}),
        ("simpo", {"label_smoothing": 0.1, "beta": 2.5}),
    ],
)
def test_good_hyperparameters(task: str, keys: dict[str, Any]) -> None:
    assert problems(task, keys) == []


# A value of each key that is not its default, and that a task with that key takes.
VALUES: dict[str, Any] = {
    "loss": ["ipo"],
    "loss_weights": [0.5],
    "beta": 0.2,
    "reference": "adapters_off",
    "label_smoothing": 0.1,
    "f_divergence": "alpha_divergence",
    "f_alpha": 0.3,
    "discopop_tau": 0.1,
    "ld_alpha": 0.5,
    "use_weighting": True,
    "ranking": "all",
    "gamma": 1.0,
    "sft_weight": 0.2,
    "desirable_weight": 2.0,
    "undesirable_weight": 2.0,
    "centering": 0.1,
}
PREFERENCE_TASKS = [name for name, task in BUILT_IN.items() if task.rows.judged]


@pytest.mark.parametrize("key", PreferenceSection.model_fields)
@pytest.mark.parametrize("task", PREFERENCE_TASKS)
def test_each_key_is_read_by_a_task_or_refused(task: str, key: str) -> None:
    """Refusals name the key, and the tasks that read it; what is read stands in the source of the task."""
    keys = {key: VALUES[key]}
    if key == "loss" and task in LOSSES:
        keys["loss"] = [LOSSES[task][-1]]
    elif task == "dpo" and (needed := {"label_smoothing": "robust", "discopop_tau": "discopop"}.get(key)):
        keys["loss"] = [needed]
    elif key == "f_alpha" and task == "dpo":
        keys["f_divergence"] = "alpha_divergence"
    read, found = READ_BY[key], problems(task, keys)
    function = import_object(BUILT_IN[task].place, "task.name")
    source = inspect.getsource(function) + inspect.getsource(preference_form) * (task != "kto")
    source += inspect.getsource(_sft) * ("_sft(" in source)
    # A reference is built by what starts a run.
    reads = r"\bReference\(" if key == "reference" else rf"\b(section|preference)\.{key}\b"
    assert (re.search(reads, source) is not None) == (task in read)
    if task in read:
        assert found == []
    else:
        assert any(f"preference.{key} " in text and (key == "loss" or ", ".join(read) in text) for text in found)


@pytest.mark.parametrize("task", [name for name, task in BUILT_IN.items() if not task.rows.judged])
def test_other_tasks_have_no_such_section(task: str) -> None:
    tree = {"task": task, "preference": {"beta": 0.2}, "model": {"name": "m"}, "data": "f", "length": {"steps": 1}}
    with pytest.raises(RecipeError, match=f"preference: {task} learns no preferences; remove the section"):
        validate_recipe(tree, tasks=BUILT_IN)


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes)).eval()


def ids(*lengths: int) -> list[list[int]]:
    return [[(7 * n + 3 * t) % 31 + 1 for t in range(n)] for n in lengths]


def test_the_plain_loop_learns_pairs() -> None:
    batches = [
        [PlainPair(*ids(3, 5, 2)), PlainPair(*ids(4, 1, 6))],
        [PlainPair(*ids(2, 3, 4)), PlainPair(*ids(6, 7, 5))],
    ]
    plain = train_dpo(tiny(), batches * 3, beta=0.5, lr=1e-2)
    assert plain.losses[0] == pytest.approx(math.log(2))
    assert plain.losses[-1] < 0.6
    ours = train_dpo(
        tiny(),
        batches * 3,
        loss=lambda w, r: pair_loss("sigmoid", Pair(w, r), *[pair(*[[0.0] * 2] * 2)] * 2, beta=0.5),
        lr=1e-2,
    )
    np.testing.assert_allclose(ours.losses, plain.losses, rtol=1e-6)
    # The number of padding tokens, and of rows beside it, is no matter.
    sums = both_answers(tiny(), batches[0])
    torch.testing.assert_close(sums[:, 1:], both_answers(tiny(), batches[0][1:]))
    nll = tiny()(input_ids=torch.tensor([ids(4)[0] + ids(6)[0]]), labels=torch.tensor([[-100] * 4 + ids(6)[0]])).loss
    torch.testing.assert_close(sums[1, 1], -6 * nll)
    mixed = train_dpo(tiny(), batches, beta=0.5, sft_weight=2.0, lr=1e-2)
    assert mixed.losses[0] == pytest.approx(math.log(2) - 2 * sums[0].sum().item() / 6)


def test_the_plain_loop_learns_labels() -> None:
    batch = [Labelled(*ids(3, 5, 2), True), Labelled(*ids(4, 1, 6), False), Labelled(*ids(2, 3, 4), True)]
    plain = train_kto(tiny(), [batch] * 4, 0.5, (1.5, 0.5), lr=1e-2)
    assert plain.losses[0] == pytest.approx((1.5 + 0.5 + 1.5) * 0.5 / 3)
    assert plain.losses[-1] < plain.losses[0] - 0.02
    model = tiny()
    reference = both_answers(model, batch).detach()
    model.load_state_dict(plain.weights)
    ratios, others = both_answers(model, batch) - reference
    labels = torch.tensor([row.desirable for row in batch])
    loss = kto(ratios, labels, baseline(others), 0.5, (1.5, 0.5)).mean()
    assert train_kto(tiny(), [batch] * 5, 0.5, (1.5, 0.5), lr=1e-2).losses[-1] == pytest.approx(loss.item(), rel=1e-6)

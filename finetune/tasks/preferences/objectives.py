"""Objectives of preferences, rewards and distillation: pure functions of log-probabilities in fp32.

Letters: `P` pairs and `B` single answers of a micro-batch, `G` rows of the global batch, `N` tokens, `K` outcomes.

An answer of n tokens has the sum p of their log-probabilities, and the log ratio r = p - p_ref; w is the chosen answer,
l the rejected one. A score s is r, or f'(exp r) (`divergence_scores`), and d = s_w - s_l. S is the sigmoid.

A loss is returned for each row. The task divides their sum by the rows of the global batch, or by its tokens where that
is said; TRL 1.16 and LLaMA-Factory (LF) take means over a micro-batch of one rank. Docstrings name further differences.
Which hyperparameters are allowed is checked by `config.preference_losses.problems`.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu

# The square of a thousand times its exponential is finite in fp32.
_MAX_EXPONENT = 30.0
# The step below 1 in fp32: no sum of probabilities is known more exactly.
_SMALLEST_REST = 2.0**-24
# exp of it is 0 in fp32, and a product with it is that 0, where -inf makes it NaN.
_LOG_ZERO = -1e4


class Pair(NamedTuple):
    """A quantity of the chosen and of the rejected answer of pairs, each (P,)."""

    chosen: Tensor
    rejected: Tensor

    def minus(self, other: "Pair") -> "Pair":
        """Returns the difference of each half."""
        return Pair(self.chosen - other.chosen, self.rejected - other.rejected)

    def over(self, tokens: "Pair") -> "Pair":
        """Returns means over tokens, given sums. An answer without tokens counts one."""
        return Pair(self.chosen / tokens.chosen.clamp(min=1), self.rejected / tokens.rejected.clamp(min=1))

    @property
    def margin(self) -> Tensor:
        """Chosen minus rejected, (P,)."""
        return self.chosen - self.rejected


def divergence_scores(ratios: Pair, divergence: str = "reverse_kl", alpha: float = 0.5) -> Pair:
    """Returns the scores f'(exp r).

    They are r (`reverse_kl`), 1 - exp(-r) (`forward_kl`), log 2 + log S(r) (`js_divergence`), and (exp((alpha - 1) r)
    - 1) / (alpha - 1) (`alpha_divergence`: `reverse_kl` at 1, `forward_kl` at 0). Beyond an exponent of 30 a score goes
    on as a straight line. TRL's goes on to 80 and is constant beyond, without a gradient; for `forward_kl` its loss is
    infinite or NaN where r < -88.

    Source: f-DPO, arXiv:2309.16240, whose alpha is 1 - alpha of TRL and of here.
    """
    power = {"forward_kl": -1.0, "alpha_divergence": alpha - 1.0}.get(divergence, 0.0)
    if divergence == "js_divergence":
        return Pair(*(math.log(2) + logsigmoid(ratio) for ratio in ratios))
    if not power:
        return ratios
    ends = (((power * ratio).clamp(max=_MAX_EXPONENT), relu(power * ratio - _MAX_EXPONENT)) for ratio in ratios)
    return Pair(*((torch.expm1(below) + math.exp(_MAX_EXPONENT) * beyond) / power for below, beyond in ends))


def policy_weights(aligned: Pair, tokens: Pair) -> Tensor:
    """Returns exp of the sum of both answers' means over tokens, (P,), given sums of log p_t - log sum_v p_v^2.

    v is the vocabulary. As in TRL, nothing bounds a weight, and `aot` has none; `sft`, with which TRL ends in an error
    of torch, is not weighted here.

    Source: WPO, arXiv:2406.11827, eq. 2 and section 3.3.
    """
    means = aligned.over(tokens)
    return (means.chosen + means.rejected).exp()


def smoothed(x: Tensor, label_smoothing: float) -> Tensor:
    """-(1 - e) log S(x) - e log S(-x) for a share e of flipped labels. Source: cDPO, ericmitchell.ai/cdpo.pdf."""
    return -(1 - label_smoothing) * logsigmoid(x) - label_smoothing * logsigmoid(-x)


def pair_loss(
    name: str,
    policy: Pair,
    reference: Pair,
    tokens: Pair,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    f_alpha: float = 0.5,
    discopop_tau: float = 0.05,
    window: Tensor | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """Returns a loss of pairs that TRL names so, (P,). With x = beta d, e = label_smoothing and R = beta r:

    - sigmoid: -log S(x). DPO, arXiv:2305.18290. LF and older TRL smooth labels here; TRL 1.16 ignores e.
    - hinge: max(0, 1 - x). SLiC, arXiv:2305.10425, on log ratios as in RSO, arXiv:2309.06657.
    - ipo: (s_w / n_w - s_l / n_l - 1 / (2 beta))^2. IPO, arXiv:2310.12036, eq. 17, has sums; TRL and LF have means.
    - sigmoid_norm: -log S(beta (s_w / n_w - s_l / n_l)). Tulu 3, arXiv:2411.15124.
    - robust: (-(1 - e) log S(x) + e log S(-x)) / (1 - 2 e). arXiv:2403.00409.
    - exo_pair: KL((S(x), S(-x)) || (1 - e, e)). EXO, arXiv:2402.00856, eq. 16.
    - nca_pair: -log S(R_w) - (log S(-R_w) + log S(-R_l)) / 2. NCA, arXiv:2402.05369.
    - bco_pair: -log S(R_w) - log S(-R_l). BCO, arXiv:2404.04656, without its running mean of rewards, as in TRL. LF has
      the mean, which depends on the order of micro-batches.
    - sppo_hard: (r_w - 1 / (2 beta))^2 + (r_l + 1 / (2 beta))^2. SPPO, arXiv:2405.00675, eq. 4.7 with P of 1 and 0.
    - apo_zero: 1 - S(R_w) + S(R_l). APO, arXiv:2408.06266, eq. 7.
    - apo_down: S(R_w) + 1 - S(R_w - R_l). APO, eq. 8.
    - discopop: (1 - m) (-log S(x)) + m exp(-x) with m = S(x / discopop_tau). DiscoPOP, arXiv:2406.08414, eq. 5. The
      last product is one exponential here; TRL's is NaN (0 * inf) where x < -88.
    - aot, aot_unpaired: `aot_loss`.
    - sft: -p_w, of which the sum is divided by chosen tokens; TRL's is a mean over those of a micro-batch.

    `policy` and `reference` are sums of log-probabilities, `tokens` numbers of tokens; for `aot` and `aot_unpaired`,
    `window` is (G, 4) of `window_values`, and `rows` (P,) are the pairs' positions in it.

    Raises:
        ValueError: If there is no such loss.
    """
    ratios = policy.minus(reference)
    scores = divergence_scores(ratios, f_divergence, f_alpha)
    x, w, rejected, e = beta * scores.margin, beta * ratios.chosen, beta * ratios.rejected, label_smoothing
    losses: dict[str, Callable[[], Tensor]] = {
        "sigmoid": lambda: -logsigmoid(x),
        "hinge": lambda: relu(1 - x),
        "ipo": lambda: (scores.over(tokens).margin - 0.5 / beta) ** 2,
        "sigmoid_norm": lambda: -logsigmoid(beta * scores.over(tokens).margin),
        "robust": lambda: (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e),
        "exo_pair": lambda: (
            x.sigmoid() * (logsigmoid(x) - math.log1p(-e)) + (-x).sigmoid() * (logsigmoid(-x) - math.log(e))
        ),
        "nca_pair": lambda: -logsigmoid(w) - 0.5 * (logsigmoid(-w) + logsigmoid(-rejected)),
        "bco_pair": lambda: -logsigmoid(w) - logsigmoid(-rejected),
        "sppo_hard": lambda: (ratios.chosen - 0.5 / beta) ** 2 + (ratios.rejected + 0.5 / beta) ** 2,
        "apo_zero": lambda: (-w).sigmoid() + rejected.sigmoid(),
        "apo_down": lambda: w.sigmoid() + (rejected - w).sigmoid(),
        "discopop": lambda: (logsigmoid(x / discopop_tau) - x).exp() - (-x / discopop_tau).sigmoid() * logsigmoid(x),
        "sft": lambda: -policy.chosen,
    }
    if window is not None and rows is not None and name in ("aot", "aot_unpaired"):
        return aot_loss(policy, reference, window, rows, beta, e, paired=name == "aot")
    if name not in losses:
        raise ValueError(f"no loss {name} of a pair; aot and aot_unpaired take the window of the global batch")
    return losses[name]()


def window_values(policy: Pair, reference: Pair) -> Tensor:
    """Returns what `aot_loss` sorts: (P, 4), the sums of the policy's halves and of the reference's."""
    return torch.stack((*policy, *reference), dim=1).detach()


def aot_loss(
    policy: Pair, reference: Pair, window: Tensor, rows: Tensor, beta: float, label_smoothing: float, *, paired: bool
) -> Tensor:
    """Smoothed sigmoid of beta (a_(k) - b_(k)), where a_(k) and b_(k) are the k-th smallest of the global batch.

    If `paired`, a is p_w - p_l of the policy and b that of the reference. Else a is r_w and b is r_l: a difference
    belongs to the pair of its a and to that of its b, which may be in another micro-batch; each gets half of the loss,
    and the gradient of its own term. TRL sorts within a micro-batch of one rank.

    Source: AOT, arXiv:2406.05882, section 3.
    """
    policy_w, policy_l, reference_w, reference_l = window.unbind(1)
    if paired:
        b = _of_same_rank(policy_w - policy_l, reference_w - reference_l)[rows]
        return smoothed(beta * (policy.margin - b), label_smoothing)
    ratios, a, b = policy.minus(reference), policy_w - reference_w, policy_l - reference_l
    loss = smoothed(beta * (ratios.chosen - _of_same_rank(a, b)[rows]), label_smoothing)
    loss = loss + smoothed(beta * (_of_same_rank(b, a)[rows] - ratios.rejected), label_smoothing)
    return loss - 0.5 * loss.detach()


def _of_same_rank(values: Tensor, others: Tensor) -> Tensor:
    """Returns, for each of (G,) values, the one of (G,) others that has its rank."""
    return others.sort().values[values.argsort(stable=True).argsort()]


# ---- without a reference, (P,)


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x <= 0; above -2^-24 as at -2^-24, so that it is at least -16.6, and its gradient finite.

    Source: Maechler, "Accurately computing log(1 - exp(-|a|))", 2012. TRL's is -inf at 0, its gradient NaN; LF has one
    formula for all x, which loses digits near 0.
    """
    split = -math.log(2)
    near = torch.log(-torch.expm1(x.clamp(min=split, max=-_SMALLEST_REST)))
    return torch.where(x < split, torch.log1p(-x.clamp(max=split).exp()), near)


def orpo(policy: Pair, tokens: Pair, beta: float) -> tuple[Tensor, Tensor]:
    """-beta log S(o), and o, the log odds ratio: o = (m - log1mexp(m))_w - (m - log1mexp(m))_l with m = p / n.

    The task adds `sft`. TRL's NLL is over the prompt, too, and is a mean over the micro-batch; LF's is -m_w.

    Source: ORPO, arXiv:2403.07691, eq. 4 and 7, whose lambda is beta.
    """
    means = policy.over(tokens)
    log_odds = means.margin - log1mexp(means.chosen) + log1mexp(means.rejected)
    return -beta * logsigmoid(log_odds), log_odds


def without_reference(values: Pair, beta: float, gamma: float = 0.0, label_smoothing: float = 0.0) -> Tensor:
    """`smoothed` of beta (v_w - v_l) - gamma. CPO: v is p, and the task adds `sft`. SimPO: v is p / n.

    With a reference of 0, `pair_loss` has CPO's `hinge` and `ipo`. TRL's NLL is a mean over a micro-batch, and added to
    SimPO, too, unless `cpo_alpha` is 0; LF adds none.

    Source: CPO, arXiv:2401.08417; SimPO, arXiv:2405.14734, with beta 2 and more.
    """
    return smoothed(beta * values.margin - gamma, label_smoothing)


def reward(scores: Pair, margin: Tensor | float = 0.0) -> Tensor:
    """-log S(s_w - s_l - margin) for scores s of a reward model. LF has no margin.

    Source: arXiv:2203.02155 (Bradley-Terry); its margin arXiv:2307.09288.
    """
    return -logsigmoid(scores.margin - margin)


def centering(scores: Pair) -> Tensor:
    """(s_w + s_l)^2, TRL's with `center_rewards_coefficient`. Source: arXiv:2312.09244, eq. 2."""
    return (scores.chosen + scores.rejected) ** 2


# ---- single answers with a label, (B,)


def baseline(window: Tensor) -> Tensor:
    """max(0, mean r) for (G,) log ratios of the global batch's mismatched answers; without a gradient.

    Source: KTO, arXiv:2402.01306. TRL's and LF's is the mean over a micro-batch, then over ranks.
    """
    return window.mean().clamp(min=0).detach()


def kto(ratios: Tensor, desirable: Tensor, z: Tensor | float, beta: float, weights: tuple[float, float]) -> Tensor:
    """weights[0] (1 - S(beta (r - z))) for desirable answers, weights[1] (1 - S(beta (z - r))) for others.

    `desirable` is (B,) bool; z is the `baseline`, or 0, which is TRL's `apo_zero_unpaired`. TRL skips rows of NaN.

    Source: KTO, arXiv:2402.01306; APO, arXiv:2408.06266, eq. 7.
    """
    gain = torch.where(desirable, ratios - z, z - ratios)
    return torch.where(desirable, *weights) * (-beta * gain).sigmoid()


# ---- distillation, (N,)


def with_rest(top: Tensor) -> Tensor:
    """Returns (N, K + 1): log-probabilities of the teacher's K likeliest outcomes, and of all others as one outcome.

    The rest is 1 - sum of the K probabilities, but at least 2^-24, also where stored ones add up to more than 1. The
    divergence of distributions joined so is at most that of the whole ones. It is `loss_add_tail` of TRL's trainer for
    teachers on a server, whose rest is at least 1e-7.
    """
    return torch.cat((top, log1mexp(top.logsumexp(-1, keepdim=True))), dim=-1)


def distillation(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """b KL(t || m) + (1 - b) KL(s || m) with m = b t + (1 - b) s; for b = 0 KL(t || s), for b = 1 KL(s || t).

    `student` and `teacher` are (N, K) log-probabilities of a vocabulary or of `with_rest`. The sum is divided by the
    learned tokens of the global batch, as TRL's is; its experimental GKD takes the mean over a micro-batch. As there,
    nothing is multiplied by the square of a temperature.

    Source: GKD, arXiv:2306.13649, eq. 2.
    """
    student, teacher = student.clamp(min=_LOG_ZERO), teacher.clamp(min=_LOG_ZERO)
    if beta in (0, 1):
        return _divergence(student, teacher) if beta else _divergence(teacher, student)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _divergence(teacher, mixture) + (1 - beta) * _divergence(student, mixture)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    return (p.exp() * (p - q)).sum(-1)


# ---- figures by TRL's names: sums, and the numbers by which they are divided


def answer_figures(policy: Tensor, rewards: Tensor, desirable: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the same of single answers. `rewards/margins` is the difference of two of these means."""
    figures = {}
    for half, mask in (("chosen", desirable), ("rejected", ~desirable)):
        for name, values in (("rewards", rewards), ("logps", policy)):
            figures[f"{name}/{half}"] = ((values.detach() * mask).sum(), mask.sum())
    return figures

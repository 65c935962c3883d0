"""The loss computed by a language model's head, some tokens at a time, so that all logits never exist at once.

Letters: N tokens of a micro-batch, C of a chunk, h width, V vocabulary.

The network's own `forward` runs; only its head, where targets have been left for it, puts out the loss in place of
logits. So backends have the head's weight in place as for any module, and what comes before the head is the
architecture's own. Where an architecture scales or caps logits behind its head, the loss is taken from logits; that
what comes out is the loss is verified at every start (`preflight.check_loss`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from finetune.distributed.strategies import tensor
from finetune.models.frozen_weights import StoredLinear, compute_dtype
from finetune.utils.errors import BackendError

if TYPE_CHECKING:
    from finetune.distributed.mesh import Group

IGNORED = -100

Forward = Callable[[torch.Tensor], torch.Tensor]


class Objective(NamedTuple):
    """What is computed of each token's logits in place of their cross-entropy."""

    values: Callable[..., torch.Tensor]
    """Returns J numbers of each token, (n, J) in fp32, given logits, (n, V) in fp32, targets, (n,), and the tokens'
    `others`. The first is the loss, and the others are figures without gradients."""
    others: tuple[Any, ...] = ()
    """Tensors of (N, ...), or what gives some of their rows for a slice of tokens."""
    opening: Callable[[Callable[[Any], None]], None] | None = None
    """Calls a function with one more of `others`, which can be read until it returns."""

    def opened(self, compute: Callable[["Objective"], torch.Tensor]) -> torch.Tensor:
        """Returns what a function gives of this objective with all of its `others`."""
        if self.opening is None:
            return compute(self)
        given, learns = list[torch.Tensor](), torch.is_grad_enabled()

        def inside(other: Any) -> None:
            with torch.set_grad_enabled(learns):
                given.append(compute(Objective(self.values, (*self.others, other))))

        self.opening(inside)
        return given[0]

    def of(self, logits: torch.Tensor, targets: torch.Tensor, tokens: slice = slice(None)) -> torch.Tensor:
        """Returns the values of some tokens, (n, J), 0 where there is nothing to learn."""
        values = self.values(logits, targets.clamp(min=0), *(other[tokens] for other in self.others))
        return values * (targets != IGNORED)[:, None]


class LogitsOf:
    """Logits of a head that is in place, in fp32 and without gradients, for slices of tokens."""

    def __init__(self, hidden: torch.Tensor, logits: Forward) -> None:
        kind = hidden.device.type
        self._hidden, self._logits = hidden, logits
        self._autocast = (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))

    def __getitem__(self, tokens: slice) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(*self._autocast):
            return self._logits(self._hidden[tokens]).float()


class LossHead:
    """A head's `forward`, which computes the summed loss while it has targets, and else logits."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._logits: Forward = head.forward
        self.computes_loss = True
        """True if it may be given targets."""
        self.targets: torch.Tensor | None = None
        """(N,) int64, -100 where there is nothing to learn."""
        self.per_token = False
        """True if it puts out the loss of each token in place of their sum."""
        self.label_smoothing = 0.0
        """Of the loss, see `plain_loss`."""
        self.objective: Objective | None = None
        """What it puts out in place of the cross-entropy."""
        self.visitor: Callable[[Any], None] | None = None
        """Is given its `LogitsOf`, while its weight is in place, and nothing else is computed."""
        self.token_group: Group | None = None
        """Ranks that share layers, and compute the loss of some tokens each, or at least its gradients. Gradients of
        the head are to be summed over them."""
        self.plants = False
        """True if it puts out `planted` in place of its own logits."""
        self.planted: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """(B, T, h) to (1, 1, J) fp32 with targets, or (1, N, J) for each token, and to (B, T, V) without."""
        group = self.token_group
        if self.plants:
            own = self._logits(hidden)
            # As far apart as no first weights have them: a cap of small logits would not be seen.
            values = torch.linspace(-60, 60, own.shape[-1], device=own.device).to(own.dtype)
            self.planted = values.expand_as(own).contiguous()
            return self.planted.clone()
        if self.visitor is not None:
            flat = hidden.flatten(0, -2)
            flat = flat if group is None else tensor.part_of_tokens(flat, group=group)
            self.visitor(LogitsOf(flat, self._logits))
            return hidden.new_zeros(1, 1, 1)
        if self.targets is None:
            if group is None:
                return self._logits(hidden)
            return tensor.split_gradients(self._logits(tensor.sum_gradients(hidden, group)), group)
        head: Any = self._head
        flat, targets, dtype, objective = hidden.flatten(0, -2), self.targets, compute_dtype(hidden), self.objective
        if group is not None:
            flat, targets = tensor.split_tokens(flat, group), tensor.part_of_tokens(targets, IGNORED, group=group)
            if objective is not None:
                others = tuple(tensor.part_of_tokens(other, group=group) for other in objective.others)
                objective = objective._replace(others=others)
        options: dict[str, Any] = {"label_smoothing": self.label_smoothing}
        # Gradients in fp16 vanish before they are scaled, which happens in the backward pass.
        if isinstance(head, nn.Linear) and type(head).forward in _PRODUCTS and dtype != torch.float16:
            compute = token_losses if self.per_token else loss_of
            given = partial(compute, flat, head.weight, head.bias, targets, dtype, **options)
        elif objective is None or objective.opening is None:
            given = partial(_of_any_head, self._logits, flat, targets, per_token=self.per_token, **options)
        else:
            # Its backward pass computes logits again, when the other network's weights are elsewhere.
            raise BackendError(
                "A teacher in each step is not offered with precision fp16, nor with adapters of the head. Set "
                "distillation.top_k, by which it is computed once before training, or leave them out."
            )
        loss = given() if objective is None else objective.opened(lambda one: given(objective=one))
        if group is not None and self.per_token:
            loss = tensor.gather_tokens(loss, self.targets.numel(), group)
        elif group is not None:
            loss = tensor.sum_outputs(loss, group)
        # A copy, not a view: wrappers that shard warn of views that leave a module.
        return loss.reshape(1, self.targets.numel() if self.per_token else 1, -1).clone()


# Methods of modules that compute a product with `weight`, and nothing else.
_PRODUCTS = (nn.Linear.forward, StoredLinear.forward)

# Keys by which configurations cap or scale logits.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")


def fuse_loss(network: PreTrainedModel | None) -> None:
    """Has a transformer's head compute the loss, where logits are what the head puts out."""
    if network is not None and not changes_logits(network.config):
        head: Any = network.get_output_embeddings()
        if isinstance(head, nn.Module):
            head.forward = LossHead(head)


def changes_logits(config: PretrainedConfig) -> bool:
    """True if an architecture says that it scales or caps logits behind its head."""
    text = config.get_text_config()
    capped = any(getattr(text, key, None) is not None for key in _CAPS)
    return capped or any(getattr(text, key, None) not in (None, 1.0) for key in _SCALES)


def loss_head(network: PreTrainedModel | None) -> LossHead | None:
    """Returns the `LossHead` that `fuse_loss` has put into a network."""
    head = network.get_output_embeddings() if network is not None else None
    forward: Any = getattr(head, "forward", None)
    return forward if isinstance(forward, LossHead) and forward.computes_loss else None


def unfuse_loss(network: PreTrainedModel) -> None:
    """Has a network's head put out logits only."""
    head = loss_head(network)
    assert head is not None
    head.computes_loss = False


def rows_of_chunk(tokens: int, vocabulary: int) -> int:
    """Returns the tokens of a chunk: few enough that its fp32 logits take 64 MiB.

    But at least 128, since products with the head's weight are slow for fewer, and at least an eighth of all, since the
    weight's gradient is gone over once a chunk.
    """
    return min(tokens, max(128, -(-tokens // 8), (1 << 24) // vocabulary))


def loss_of(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dtype: torch.dtype,
    *,
    label_smoothing: float = 0.0,
    objective: Objective | None = None,
) -> torch.Tensor:
    """Returns the summed cross-entropy of `hidden @ weight.T + bias`, a scalar in fp32; or an objective's sums, (J,).

    Gradients are computed on the way, one pass over each chunk, and only scaled by the backward pass. Products are
    in `dtype`; softmax, loss, and the sum of the weight's gradient over chunks are in fp32.

    `torch.nn.functional.linear_cross_entropy` does the same, but puts out the loss in the dtype of its inputs: rounded
    to bf16 it is wrong by up to 4e-3.

    Args:
        hidden: (N, h).
        weight: (V, h).
        bias: (V,).
        targets: (N,).
        dtype: Type of the products.
        label_smoothing: See `plain_loss`.
    """
    given = (hidden, weight, bias, targets, dtype, label_smoothing, objective)
    loss: torch.Tensor = _Chunked.apply(torch.is_grad_enabled(), *given)  # type: ignore[no-untyped-call]
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, learns: bool, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        wanted = [learns and needed for needed in ctx.needs_input_grad[1:4]]
        with torch.autocast(hidden.device.type, enabled=False):
            loss, ctx.kept = _one_pass(wanted, hidden, *others)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # The loss outlives its backward pass, and this node with it: what it kept would be there twice, as torch copies
        # a gradient that somebody else holds.
        kept, ctx.kept = ctx.kept, None
        if kept is None:
            raise RuntimeError("This loss has been differentiated before, and its gradients are gone.")
        # Of an objective's sums, the first is the loss.
        factor = gradients[0].reshape(-1)[0]
        return None, *(None if t is None else t.mul_(factor) for t in kept), None, None, None, None


def token_losses(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dtype: torch.dtype,
    *,
    label_smoothing: float = 0.0,
    objective: Objective | None = None,
) -> torch.Tensor:
    """Returns the cross-entropy of each token, (N,) in fp32, or an objective's values, (N, J); else as `loss_of`.

    What a token's loss counts for is known only in the backward pass. The gradient for `hidden` is scaled then; where
    the head is trained as well, its products are computed a second time.
    """
    given = (hidden, weight, bias, targets, dtype, label_smoothing, objective)
    losses: torch.Tensor = _TokenLosses.apply(torch.is_grad_enabled(), *given)  # type: ignore[no-untyped-call]
    return losses[:, 0] if objective is None else losses


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, learns: bool, hidden: torch.Tensor, *others: Any) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        wanted = [learns and ctx.needs_input_grad[1], False, False]
        with torch.autocast(hidden.device.type, enabled=False):
            _, (ctx.hidden_gradient, *_) = _one_pass(wanted, hidden, *others, losses=losses)
        weight, bias, targets, *ctx.options = others
        ctx.save_for_backward(hidden, weight, bias, targets)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hidden, weight, bias, targets = ctx.saved_tensors
        factors, for_head = gradients[0][:, 0], [False, *ctx.needs_input_grad[2:4]]
        of_hidden, ctx.hidden_gradient = ctx.hidden_gradient, None
        if of_hidden is not None:
            of_hidden.mul_(factors[:, None])
        of_head: list[torch.Tensor | None] = [None, None]
        if any(for_head):
            with torch.autocast(hidden.device.type, enabled=False):
                _, (_, *of_head) = _one_pass(for_head, hidden, weight, bias, targets, *ctx.options, factors=factors)
        return None, of_hidden, *of_head, None, None, None, None


def _one_pass(
    wanted: Sequence[bool],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    dtype: torch.dtype,
    label_smoothing: float,
    objective: Objective | None,
    *,
    factors: torch.Tensor | None = None,
    losses: list[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Returns the loss, and its gradients for hidden, weight and bias, where they are wanted.

    Args:
        factors: What the loss of each token counts for, (N,); None for 1.
        losses: Gets the values of each token, (n, J), chunk by chunk.
    """
    for_hidden, for_weight, for_bias = wanted
    tokens, vocabulary = hidden.shape[0], weight.shape[0]
    rows = rows_of_chunk(tokens, vocabulary)
    x, w = hidden.to(dtype), weight.to(dtype)
    make: dict[str, Any] = {"device": hidden.device}
    loss = torch.zeros((), **make)
    hidden_gradient = torch.empty_like(x) if for_hidden else None
    weight_gradient = torch.empty(weight.shape, **make) if for_weight else None
    bias_gradient = torch.zeros(vocabulary, **make) if for_bias else None
    # Reused by all chunks: making them anew costs more than filling them.
    products = torch.empty(rows, vocabulary, dtype=dtype, **make)
    few = rows_in_cache(rows, vocabulary, hidden.device.type) if objective is None else rows
    scratch = torch.empty(few if dtype != torch.float32 else 0, vocabulary, **make)
    step = torch.empty(weight.shape if for_weight and dtype != torch.float32 and rows < tokens else 0, **make)
    learned = targets != IGNORED
    places, counts = torch.where(learned, targets, 0)[:, None], learned.float()[:, None]
    counts = counts if factors is None else counts * factors[:, None]
    for first in range(0, tokens, rows):
        chunk = slice(first, min(first + rows, tokens))
        product = products[: chunk.stop - first]
        torch.mm(x[chunk], w.t(), out=product)
        for begin in range(first, chunk.stop, few):
            some = slice(begin, min(begin + few, chunk.stop))
            of_some = product[some.start - first : some.stop - first]
            p = of_some if dtype == torch.float32 else scratch[: some.stop - begin].copy_(of_some)
            if bias is not None:
                p.add_(bias)
            if objective is None:
                each = _score(p, places[some], counts[some], label_smoothing, learns=any(wanted))
                loss += each.sum()
            else:
                each = _values(p, objective, targets[some], some, counts[some], learns=any(wanted))
                loss = loss + each.sum(0)
            if losses is not None:
                losses.append(each)
            if bias_gradient is not None:
                bias_gradient += p.sum(0)
            if any(wanted) and p is not of_some:
                of_some.copy_(p)
        if hidden_gradient is not None:
            torch.mm(product, w, out=hidden_gradient[chunk])
        if weight_gradient is None:
            continue
        if dtype == torch.float32:
            weight_gradient.addmm_(product.t(), x[chunk], beta=0 if first == 0 else 1)
        elif first == 0:
            weight_gradient.copy_(product.t() @ x[chunk])
        else:
            weight_gradient += step.copy_(product.t() @ x[chunk])
    given = (hidden, weight, bias)
    gradients = (hidden_gradient, weight_gradient, bias_gradient)
    return loss, [None if f is None or t is None else f.to(t.dtype) for f, t in zip(gradients, given, strict=True)]


def rows_in_cache(rows: int, vocabulary: int, device: str) -> int:
    """Returns the tokens of a chunk whose fp32 logits stay in a CPU's cache; on a GPU, all of the chunk's."""
    return max(1, min(rows, (1 << 19) // vocabulary)) if device == "cpu" else rows


def _score(
    p: torch.Tensor, places: torch.Tensor, counts: torch.Tensor, label_smoothing: float, *, learns: bool
) -> torch.Tensor:
    """Returns the loss of each row of logits, (N, 1), which become their gradient in place, if that is wanted.

    Args:
        p: (N, V) fp32.
        places: (N, 1), the targets.
        counts: (N, 1), factors of the losses: 0 where there is nothing to learn.
    """
    p.sub_(p.amax(1, keepdim=True))
    score = p.gather(1, places)
    if label_smoothing:
        score = (1 - label_smoothing) * score + label_smoothing * p.mean(1, keepdim=True)
    total = p.exp_().sum(1, keepdim=True)
    if learns:
        # softmax - one-hot, and nothing for what is not learned.
        p.mul_(counts / total).scatter_add_(1, places, (label_smoothing - 1) * counts)
        if label_smoothing:
            p.sub_(label_smoothing / p.shape[1] * counts)
    return (total.log() - score) * counts


def _values(
    p: torch.Tensor, objective: Objective, targets: torch.Tensor, tokens: slice, counts: torch.Tensor, *, learns: bool
) -> torch.Tensor:
    """Returns an objective's values of each row of logits, (n, J), as `_score` does the loss."""
    with torch.set_grad_enabled(learns):
        logits = p.detach().requires_grad_(learns)
        values = objective.of(logits, targets, tokens)
        if learns:
            p.copy_(torch.autograd.grad((values[:, :1] * counts).sum(), logits)[0])
    return values.detach()


def _of_any_head(
    logits: Forward,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    per_token: bool,
    label_smoothing: float,
    objective: Objective | None = None,
) -> torch.Tensor:
    """Computes the loss of a head that is more than a product (adapters, quantized weights), each chunk twice."""
    options: dict[str, Any] = {"per_token": per_token, "label_smoothing": label_smoothing, "objective": objective}

    def of_chunk(hidden: torch.Tensor, tokens: slice) -> torch.Tensor:
        return plain_loss(logits(hidden), targets[tokens], tokens=tokens, **options)

    rows = rows_of_chunk(hidden.shape[0], 1 << 17)
    chunks = enumerate(torch.split(hidden, rows))
    places = ((some, slice(index * rows, index * rows + len(some))) for index, some in chunks)
    each = [checkpoint(of_chunk, some, tokens, use_reentrant=False) for some, tokens in places]
    return torch.cat(each) if per_token else sum(each[1:], each[0])


def plain_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    per_token: bool = False,
    label_smoothing: float = 0.0,
    objective: Objective | None = None,
    tokens: slice = slice(None),
) -> torch.Tensor:
    """Returns the summed cross-entropy of logits, in fp32 whatever they are in: bf16 sums lose whole tokens.

    Or that of each token, flattened; or an objective's sums, (J,), or values of each token, (n, J).

    Args:
        logits: (..., V).
        targets: (...), -100 where there is nothing to learn.
        label_smoothing: Share e of the loss that is the mean of -log p over all V. Source: Szegedy et al. 2016,
            "Rethinking the Inception Architecture"; transformers 5.23, `LabelSmoother` in `trainer_pt_utils.py`.
        tokens: Those of the objective's `others`.
    """
    if objective is not None:
        values = objective.of(logits.float().flatten(0, -2), targets.flatten(), tokens)
        return values if per_token else values.sum(0)
    return functional.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none" if per_token else "sum",
        label_smoothing=label_smoothing,
    )

"""Networks as texts of this field write them, and with parameters of every kind, as tasks of a user's own."""

import math

import numpy as np
import torch
from own_task import Points
from torch import nn
from torch.nn import functional

from finetune.tasks.task import Task, TaskData

CLASSES = 4


class Digits(Points):
    """Rows of 64 numbers that have one of four classes: 8 vectors of 8, or an image of 8 by 8."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, 64, generator=generator)
        self.targets = self.inputs.view(count, CLASSES, 16).sum(-1).argmax(-1)


class Tokens(Digits):
    """Rows of 64 tokens, each of which is to be predicted from those before it."""

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        tokens = self.inputs[rows].mul(4).long().clamp(-8, 7) + 8
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def num_targets(self, rows: np.ndarray) -> int:
        return 63 * len(rows)


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(64, 24), nn.LayerNorm(24), nn.Linear(24, CLASSES)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(functional.relu(self.norm(self.fc1(inputs)))))


class Encoder(nn.Module):
    """A classifier of torch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.encoder(inputs.view(-1, 8, 8)).mean(1))


class Attention(nn.Module):
    """A classifier whose class token looks at the inputs through torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.attention = nn.MultiheadAttention(8, num_heads=2, batch_first=True)
        self.classifier = nn.Linear(8, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([self.cls_token.expand(len(inputs), -1, -1), inputs.view(-1, 8, 8)], 1)
        seen, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.classifier(seen[:, 0])


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.shape
        q, k, v = (part.view(B, T, self.heads, -1).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(C, -1))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model by hand, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(16, 16), nn.Embedding(64, 16)
        self.blocks = nn.ModuleList([Block(16, 2) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 16, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class ViT(nn.Module):
    """Patches of an image by a convolution, with a class token, positions, and a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 8, kernel_size=2, stride=2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, 8) * 0.02)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, CLASSES)
        self.logit_scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.patches(inputs.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.block(x)[:, 0]) * self.logit_scale.exp()


class Odd(nn.Module):
    """Parameters of every kind: without dimensions or elements, not contiguous, frozen in dtypes of other tables."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(64, 24), nn.Linear(24, CLASSES)
        self.scale, self.shift = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(0.5))
        self.turned, self.expanded = nn.Parameter(torch.randn(24, 24).t()), nn.Parameter(torch.ones(1).expand(24))
        self.empty, self.no_inputs = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 24))
        self.temperature = nn.Parameter(torch.tensor(2.0), requires_grad=False)
        for dtype in ("int8", "bool", "float64", "complex64"):
            setattr(self, dtype, nn.Parameter(torch.ones(24, 3).to(getattr(torch, dtype)), requires_grad=False))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = (self.fc(inputs) + inputs[:, :0] @ self.no_inputs).tanh() * self.scale + self.shift + self.empty.sum()
        hidden = hidden @ self.turned * self.expanded / self.temperature
        for table in (self.int8, self.bool, self.float64, self.complex64.real):
            hidden = hidden * table[:, 0].to(hidden.dtype)
        return self.head(hidden)


class FewRows(nn.Module):
    """A head of one row on a frozen backbone: of two ranks one holds nothing that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(64, 24).requires_grad_(False)
        self.head = nn.Linear(24, 1, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        score = self.head(self.backbone(inputs).tanh())
        return torch.cat([score * factor for factor in range(CLASSES)], -1)


class Unused(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.tensor(1.0))


NETWORKS = {
    "mlp": MLP,
    "encoder": Encoder,
    "attention": Attention,
    "gpt": GPT,
    "vit": ViT,
    "odd": Odd,
    "few_rows": FewRows,
    "unused": Unused,
}


def classifier(network: str = "mlp", dtype: str = "float32", returns: str = "loss") -> Task:
    """A task of one of these networks.

    Args:
        dtype: Of its last parameter.
        returns: What its loss returns: `loss`, or a mistake.
    """

    def build() -> nn.Module:
        made = NETWORKS[network]()
        last = [*made.parameters()][-1]
        last.data = last.data.to(getattr(torch, dtype))
        return made

    def build_model(recipe, data):
        torch.manual_seed(recipe.seed)
        return build()

    def skeleton(recipe, data):
        with torch.device("meta"):
            return build()

    def loss_sum(network, batch):
        logits = network(batch["inputs"]).float()
        losses = functional.cross_entropy(logits.flatten(0, -2), batch["targets"].flatten(), reduction="none")
        loss = losses.sum()
        return {
            "loss": loss,
            "vector": losses,
            "detached": loss.detach(),
            "float": loss.item() if returns == "float" else None,
            "pair": (loss, logits),
            "half": loss.bfloat16(),
            "nothing": None,
        }[returns]

    rows = Tokens if network == "gpt" else Digits
    return Task(
        build_data=lambda recipe, quiet: TaskData(train=rows(200, 1), validation=rows(33, 2)),
        build_model=build_model,
        loss_sum=loss_sum,
        build_skeleton=skeleton,
    )

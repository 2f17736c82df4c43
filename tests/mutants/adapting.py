"""Faults of what is put beside frozen weights, and of what train mode alone drops."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put_class


class Bottleneck(nn.Module):
    """A linear map that is kept as it is, with a narrow way beside it that starts as nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.down = nn.Linear(width, width), nn.Linear(width, 2, bias=False)
        self.up = nn.Parameter(torch.zeros(width, 2))
        self.base.requires_grad_(False)
        self.start()

    def start(self) -> None:
        nn.init.normal_(self.down.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.down(x) @ self.up.T
        return out


class Adapted(nn.Module):
    """A feed-forward layer of which both matrices are adapted."""

    def __init__(self, c: DrawnConfig, part: type[Bottleneck]) -> None:
        super().__init__()
        self.first, self.second = part(c.d_model), part(c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(F.gelu(self.first(x)))
        return out


def adapted(part: type[Bottleneck] = Bottleneck) -> Subject:
    part = put_class(part)
    return Subject(
        kind="feed_forward", build=lambda c: Adapted(c, part), forward=lambda m, x: m(x), declares={"frozen": True}
    )


@fault(
    "TR-both-zero",
    "Both matrices of the way beside a frozen map start at zero, and neither learns",
    killed_by=("training.parameters-move",),
    cause="both start at zero",
)
def both_zero() -> Subject:
    class Zero(Bottleneck):
        def start(self) -> None:
            nn.init.zeros_(self.down.weight)

    return adapted(Zero)


class Dropping(nn.Module):
    """Causal attention with products of three axes, in which weights are dropped."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads, self.rate = c.num_heads, c.dropout
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def fold(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2).flatten(0, 1)

    def weigh(self, scores: Tensor) -> Tensor:
        return F.dropout(scores.softmax(-1), self.rate, self.training)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.fold(p(x)) for p in (self.q, self.k, self.v))
        scores = torch.baddbmm(torch.zeros((), dtype=x.dtype, device=x.device), q, k.mT, alpha=q.shape[-1] ** -0.5)
        scores = scores.unflatten(0, (len(x), self.heads))
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = self.weigh(scores.masked_fill(later, float("-inf"))).flatten(0, 1)
        out: Tensor = self.o((weights @ v).unflatten(0, (len(x), self.heads)).transpose(1, 2).flatten(2))
        return out


def dropping(part: type[Dropping] = Dropping) -> Subject:
    return Subject(
        kind="self_attention", build=put_class(part), forward=lambda m, x: m(x), mask_forms=(),
        declares={"causal": True, "positions": "none"},
    )  # fmt: skip


@fault(
    "dropout-scores",
    "Dropout acts on the scores, hidden ones among them, before the softmax",
    killed_by=("dropout.places",),
    cause="before the softmax",
)
def scores() -> Subject:
    class Early(Dropping):
        def weigh(self, scores: Tensor) -> Tensor:
            return F.dropout(scores.clamp(min=-1e4), self.rate, self.training).softmax(-1)

    return dropping(Early)


class Told(nn.Module):
    """A classifier of tokens whose blocks are dropped from by code of their own."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.rate, self.table = c.dropout, nn.Embedding(c.vocab_size, c.d_model)
        self.mix = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True)
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def kept(self, x: Tensor, ones: Tensor) -> Tensor:
        return x * ones / (1 - self.rate)

    def drop(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        return self.kept(x, torch.rand_like(x) >= self.rate)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.table(tokens))
        x = x + self.drop(self.mix(*[self.norm(x)] * 3, need_weights=False)[0])
        out: Tensor = self.head(x.mean(1))
        return out


def told(part: type[Told] = Told) -> Subject:
    return Subject(
        kind="classifier", build=put_class(part), forward=lambda m, x: m(x), mask_forms=(),
        declares={"positions": "none", "pooling": "mean"},
    )  # fmt: skip


@fault(
    "dropout-unscaled-model",
    "Inside a model what is kept is not divided by the share that is kept",
    killed_by=("dropout.places",),
    cause="not by 1 / (1 - p)",
)
def unscaled_model() -> Subject:
    class Plain(Told):
        def kept(self, x: Tensor, ones: Tensor) -> Tensor:
            return x.masked_fill(~ones, 0.0)

    return told(Plain)

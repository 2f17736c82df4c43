"""Faults that fewer bits, mixed precision or compiled code bring out; and doors and depths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.adapters.reference_models import facts_of, forward
from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.reference.model import build
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.parts import SelfAttention, self_attention, sized


@fault(
    "NM12-ladder",
    "The sum of squares is accumulated in bfloat16, term by term",
    killed_by=("numerics.precision-ladder",),
    cause="units in the last place",
)
def accumulated() -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x[..., :1])
            for channel in x.split(1, dim=-1):
                for _ in range(64):  # as if it were as many times as wide
                    total = total + channel * channel
            return self.weight * x / (total / (64 * x.shape[-1]) + 1e-6).sqrt()

    return Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x), declares={"norm": "rms"})


@fault(
    "RP05-ladder",
    "Rotary angles are computed in the low precision",
    killed_by=("numerics.precision-ladder",),
    cause="units in the last place",
)
def low_angles() -> Subject:
    def forward(model: Any, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = torch.arange(half, dtype=x.dtype).neg().div(half).mul(9.21).exp()
        angle = (positions.to(x.dtype) * 333)[:, None] * frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)

    return Subject(kind="rotary", forward=forward, declares={"layout": "halves"})


@fault(
    "PM05-autocast",
    "A mask constant overflows under autocast, and zero times infinity is NaN",
    killed_by=("numerics.autocast",),
    cause="this one alone",
)
def overflows() -> Subject:
    class Masked(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            output = super().forward(x, attention_mask)
            if torch.is_autocast_enabled("cpu"):
                output = output + (torch.tensor(3.4e38).to(torch.float16) * 0).to(output.dtype)
            return output

    return self_attention(Masked)


@fault(
    "autocast-raises", "Two dtypes meet under autocast", killed_by=("numerics.autocast",), cause="raises under autocast"
)
def mixes() -> Subject:
    class Buffered(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            output = torch.zeros_like(x)
            chosen = torch.ones(x.shape[:2], dtype=torch.bool)
            output[chosen] = F.relu(self.inner(x))[chosen]
            return output

    return Subject(kind="feed_forward", build=lambda c: Buffered(c.d_model), forward=lambda m, x: m(x))


@fault("BK04-compile", "The compiled path takes another kernel", killed_by=("numerics.compile",), cause="compiled")
def other_kernel() -> Subject:
    class Network(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            approximate = "tanh" if torch.compiler.is_compiling() else "none"
            return F.gelu(self.inner(x), approximate=approximate)

    return Subject(kind="feed_forward", build=lambda c: Network(c.d_model), forward=lambda m, x: m(x))


class Depth(nn.Module):
    """A feed-forward network behind stochastic depth of a kind that a fault chooses."""

    def __init__(self, width: int, drop: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.drop_path = nn.Linear(width, width), drop()

    def forward(self, x: Tensor) -> Tensor:
        return self.drop_path(self.inner(x).relu())


class DropPath(nn.Module):
    """Stochastic depth as it is meant."""

    drop_prob = 0.2

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), *(1,) * (x.ndim - 1)) >= self.drop_prob) / (1 - self.drop_prob)


def depth(drop: type[nn.Module]) -> Subject:
    drop = put(drop, instead_of=DropPath)
    return Subject(kind="feed_forward", build=lambda c: Depth(c.d_model, drop), forward=lambda m, x: m(x))


@fault(
    "DR04-depth",
    "Stochastic depth scales in neither mode",
    killed_by=("droppath.expectation",),
    cause="scaled by 1, not by 1.25",
)
def unscaled() -> Subject:
    class DropPath(nn.Module):
        drop_prob = 0.2

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x * (torch.rand(len(x), *(1,) * (x.ndim - 1)) >= self.drop_prob)

    return depth(DropPath)


@fault("DR-tokens", "Stochastic depth drops tokens, not samples", killed_by=("droppath.expectation",), cause="dropout")
def drops_tokens() -> Subject:
    class DropPath(nn.Module):
        drop_prob = 0.2

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(x, self.drop_prob, self.training)

    return depth(DropPath)


@fault(
    "EM-door",
    "Embeddings are scaled by sqrt(d) at one door only",
    citation="documented bug EM05, in its coarser form",
    killed_by=("embedding.entry",),
    cause="not scaled",
)
def one_door() -> Subject:
    power = put(0.5, instead_of=0.0)

    def make(config: DrawnConfig) -> nn.Module:
        return build(sized(config, architecture="decoder", positions="rotary"))

    def embed(model: nn.Module, embeddings: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return model(None, attention_mask, embeddings=embeddings / embeddings.shape[-1] ** power)

    facts = facts_of(sized(DrawnConfig(), architecture="decoder", positions="rotary"))
    return Subject(kind="decoder", build=make, forward=forward, embed=embed, declares=facts)

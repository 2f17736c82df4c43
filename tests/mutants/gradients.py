"""Faults of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.parts import SelfAttention, self_attention


@fault(
    "gradient-root",
    "The root of a mean square without eps: NaN at a token of zeros",
    killed_by=("gradients.finite",),
    cause="at inputs of scale 0",
)
def root_of_zero() -> Subject:
    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            size = x.square().mean(dim=-1, keepdim=True).sqrt()
            return self.weight * torch.where(size > 0, x / size.clamp(min=1e-12), 0.0)

    return Subject(kind="norm", build=lambda c: Norm(c.d_model), forward=lambda m, x: m(x))


@fault(
    "gradient-kernel",
    "A kernel of its own whose backward forgets the scale",
    killed_by=("gradients.gradcheck",),
    cause="in the backward of Scaled, written by hand, the gradient of scores: it is 2 times",
)
def forgotten_scale() -> Subject:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor, factor: float) -> Tensor:
            ctx.factor = factor
            return scores * factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return gradient, None

    class Kernel(SelfAttention):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return Scaled.apply(super().forward(x, attention_mask), 0.5)

    return self_attention(Kernel)


@fault(
    "gradient-second",
    "A kernel whose backward is cut off from its input: the second gradient lacks a term",
    killed_by=("gradients.double-backward",),
    cause="second gradient",
)
def second_gradient_cut() -> Subject:
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return gradient * 2 * x.detach()

    class Network(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return Squared.apply(self.inner(x))

    return Subject(kind="feed_forward", build=lambda c: Network(c.d_model), forward=lambda m, x: m(x))


@fault(
    "EX01",
    "Recomputation draws other dropout masks",
    killed_by=("gradients.checkpointing",),
    cause="drops others than the forward",
)
def redrawn() -> Subject:
    class Network(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = nn.Linear(width, width)
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return self.inner(x)
            keep = (torch.rand(x.shape, generator=self.generator) < 0.5).to(x.dtype)
            return self.inner(x) * keep * 2

    return Subject(kind="feed_forward", build=lambda c: Network(c.d_model), forward=lambda m, x: m(x))

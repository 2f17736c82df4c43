"""Faults that half-precision inputs bring out where much is summed: what is kept between blocks has their dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.tiled import State, Tiles, tiled


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(x.dtype)


class HalfOutput(Tiles):
    """What is summed of the output is kept in the dtype of the inputs from tile to tile."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        top, total, sums = super().join(state, s, v)
        return top, total, stored(sums, self.given)


@fault(
    "HS-output",
    "What is summed of the output is kept in the dtype of the inputs from tile to tile",
    killed_by=("attention.half-precision",),
    cause="a sum of many terms is kept in bfloat16",
)
def output() -> Subject:
    return tiled(HalfOutput, 64)


class HalfTotal(Tiles):
    """The denominator is kept in the dtype of the inputs from tile to tile."""

    def join(self, state: State, s: Tensor, v: Tensor) -> State:
        top, total, sums = super().join(state, s, v)
        return top, stored(total, self.given), sums


@fault(
    "HS-total",
    "The denominator is kept in the dtype of the inputs from tile to tile",
    killed_by=("attention.half-precision",),
    cause="a sum of many terms is kept in",
)
def total() -> Subject:
    return tiled(HalfTotal, 16)


class HalfValues(Tiles):
    """The gradient of the values is added up in memory of the inputs' dtype, tile by tile of queries."""

    def add(self, whole: Tensor, at: range, part: Tensor, other: range) -> None:
        super().add(whole, at, part, other)
        whole[:, :, at.start : at.stop] = stored(whole[:, :, at.start : at.stop], self.given)


@fault(
    "HS-backward",
    "Gradients are added up in memory of the inputs' dtype, tile by tile",
    killed_by=("attention.half-precision",),
    cause="a sum of many terms is kept in",
)
def backward() -> Subject:
    return tiled(HalfValues, 16)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        weights = x.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        total = torch.zeros_like(w[..., :1])
        for block in (w * g).split(4, -1):
            total = total + block.sum(-1, keepdim=True)
        return w * (g - total)  # type: ignore[no-any-return]


@fault(
    "HS-softmax",
    "The backward of a softmax adds w g up in the dtype of the scores, four entries at a time",
    killed_by=("softmax.long-rows",),
)
def softmax() -> Subject:
    function = put(lambda x: _Softmax.apply(x), instead_of=lambda x: x.softmax(-1))  # type: ignore[no-untyped-call]
    return Subject(kind="softmax", forward=lambda m, scores, dim=-1: function(scores.movedim(dim, -1)).movedim(-1, dim))


@fault(
    "HS-loss",
    "A loss adds its tokens up in the dtype of the logits, eight at a time",
    killed_by=("loss.half-precision",),
    cause="the sum over tokens stops growing at",
)
def loss() -> Subject:
    def wrong(x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part in F.cross_entropy(x, y, reduction="none").split(2):
            total = total + part.sum()
        return total / (y != -100).sum().clamp(min=1)

    function = put(wrong, instead_of=F.cross_entropy)
    return Subject(
        kind="loss",
        forward=lambda m, logits, labels: function(logits.flatten(0, 1), labels.flatten()),
        declares={"shifts_labels": False},
    )


class _Norm(nn.Module):
    """Divides by the root mean square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def squares(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32)).square().sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * (self.squares(x) / x.shape[-1] + 1e-6).rsqrt()).to(x.dtype)


@fault(
    "HS-norm",
    "A norm adds the squares of 4 channels at a time to a sum in the dtype of its input",
    killed_by=("norm.half-precision",),
    cause="the sum of squares ends at",
)
def norm() -> Subject:
    class Wrong(_Norm):
        def squares(self, x: Tensor) -> Tensor:
            total = torch.zeros_like(x[..., :1])
            for part in super_of(x).split(4, -1):
                total = total + part.square().sum(-1, keepdim=True).to(x.dtype)
            return total.to(torch.promote_types(x.dtype, torch.float32))

    def super_of(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    made = put(Wrong, instead_of=_Norm)
    return Subject(kind="norm", build=lambda c: made(c.d_model), forward=lambda m, x: m(x), declares={"norm": "rms"})

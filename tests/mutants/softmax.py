"""Faults of softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


def _softmax(function: Any) -> Subject:
    function = put(function, instead_of=torch.softmax)
    return Subject(kind="softmax", forward=lambda m, scores, dim=-1: function(scores, dim))


@fault(
    "softmax-naive",
    "The maximum is not subtracted",
    killed_by=("softmax.no-overflow", "softmax.shift-invariance"),
    cause="the maximum is not subtracted",
)
def naive() -> Subject:
    return _softmax(lambda x, dim: x.exp() / x.exp().sum(dim, keepdim=True))


@fault(
    "SM08",
    "Masked rows clamp changes the row max",
    citation="clamping the running maximum at 0 in a fused softmax",
    killed_by=("softmax.shift-invariance", "softmax.no-overflow"),
    cause="the maximum is not subtracted",
)
def clamped_maximum() -> Subject:
    def function(x: Tensor, dim: int) -> Tensor:
        shifted = (x - x.amax(dim, keepdim=True).clamp(min=0)).exp()
        return shifted / shifted.sum(dim, keepdim=True)

    return _softmax(function)


@fault(
    "SM01-softmax",
    "Softmax over another axis than the one asked for",
    citation="documented as softmax over the query axis instead of keys",
    killed_by=("softmax.simplex", "softmax.axis", "softmax.order"),
    cause="axis",
)
def wrong_axis() -> Subject:
    return Subject(kind="softmax", forward=lambda m, scores: scores.softmax(-2))


@fault(
    "PM07-softmax",
    "-inf is replaced by a constant that is not small enough",
    killed_by=("softmax.masked-is-zero",),
    cause="the smallest finite number",
)
def weak_constant() -> Subject:
    return _softmax(lambda x, dim: x.clamp(min=-20).softmax(dim))


@fault(
    "softmax-gradient",
    "The normaliser is cut out of the gradient",
    killed_by=("softmax.jacobian",),
    cause="cuts the graph",
)
def detached_sum() -> Subject:
    def function(x: Tensor, dim: int) -> Tensor:
        shifted = (x - x.amax(dim, keepdim=True).detach()).exp()
        return shifted / shifted.sum(dim, keepdim=True).detach()

    return _softmax(function)


@fault(
    "SM04",
    "fp16/bf16 running sum saturates: probabilities sum to 2",
    citation="accumulating a long row in the dtype of its entries",
    killed_by=("softmax.accuracy",),
    cause="less accurate than rounding",
)
def half_sum() -> Subject:
    def function(x: Tensor, dim: int) -> Tensor:
        shifted = (x - x.amax(dim, keepdim=True)).exp()
        total = torch.zeros_like(shifted.select(dim, 0))
        for i in range(x.shape[dim]):
            total = total + shifted.select(dim, i)
        return shifted / total.unsqueeze(dim)

    return _softmax(function)


@fault(
    "softmax-index",
    "The temperature depends on the index of the entry",
    killed_by=("permutation.softmax-conjugation",),
    cause="permuting rows and columns",
)
def position_dependent() -> Subject:
    return _softmax(lambda x, dim: (x * (1 + 0.01 * torch.arange(x.shape[-1], dtype=x.dtype))).softmax(dim))

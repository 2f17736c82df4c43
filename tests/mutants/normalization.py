"""Faults of normalization layers: the variance, eps, the axes, the dtype, the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

EPS = 1e-5


class Norm(nn.Module):
    """A LayerNorm (or RMSNorm) whose normalised value a fault exchanges."""

    def __init__(self, width: int, normalise: Callable[[Tensor], Tensor], bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None
        self.normalise = normalise

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * self.normalise(x)
        return y if self.bias is None else y + self.bias


def right(x: Tensor) -> Tensor:
    return centred(x) / (x.var(dim=-1, keepdim=True, unbiased=False) + EPS).sqrt()


def right_rms(x: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    return (wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt()).to(x.dtype)


def norm(normalise: Callable[[Tensor], Tensor], kind: str = "layer", declared: str | None = None) -> Subject:
    normalise = put(normalise, instead_of=right if kind == "layer" else right_rms)
    return Subject(
        kind="norm",
        build=lambda c: Norm(c.d_model, normalise, kind == "layer"),
        forward=lambda m, x: m(x),
        declares={"norm": declared or kind},
    )


def centred(x: Tensor) -> Tensor:
    return x - x.mean(dim=-1, keepdim=True)


@fault(
    "NM01",
    "LayerNorm with unbiased variance",
    killed_by=("norm.definition", "norm.statistics"),
    cause="d - 1",
)
def unbiased() -> Subject:
    return norm(lambda x: centred(x) / (x.var(dim=-1, keepdim=True) + EPS).sqrt())


@fault(
    "NM02",
    "eps added outside the square root",
    killed_by=("norm.definition",),
    cause="outside the root",
)
def outside() -> Subject:
    return norm(lambda x: centred(x) / (x.var(dim=-1, keepdim=True, unbiased=False).sqrt() + EPS))


@fault(
    "NM04",
    "One-pass variance cancels catastrophically",
    killed_by=("norm.definition",),
    cause="E[x^2] - E[x]^2",
)
def one_pass() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = (x * x).mean(dim=-1, keepdim=True) - mean * mean
        return (x - mean) / (variance.clamp(min=0) + EPS).sqrt()

    return norm(normalise)


@fault(
    "norm-shards",
    "Statistics of two shards of the channels merged without how far the shards' means lie apart",
    killed_by=("norm.definition", "norm.statistics"),
    cause="shards' means lie apart is left out",
)
def merged_shards() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        squares = [centred(shard).square().sum(dim=-1, keepdim=True) for shard in x.chunk(2, dim=-1)]
        return centred(x) / (torch.stack(squares).sum(dim=0) / x.shape[-1] + EPS).sqrt()

    return norm(normalise)


@fault(
    "norm-batch", "Statistics over the batch, as in BatchNorm", killed_by=("norm.per-token",), cause="over the batch"
)
def over_the_batch() -> Subject:
    return norm(lambda x: (x - x.mean(dim=0, keepdim=True)) / (x.var(dim=0, keepdim=True, unbiased=False) + EPS).sqrt())


@fault("norm-time", "Statistics over time", killed_by=("norm.per-token",), cause="over time")
def over_time() -> Subject:
    return norm(lambda x: (x - x.mean(dim=1, keepdim=True)) / (x.var(dim=1, keepdim=True, unbiased=False) + EPS).sqrt())


@fault(
    "norm-variance",
    "Divided by the variance, not by its root",
    killed_by=("norm.scale-invariance", "norm.definition"),
    cause="times 2.0",
)
def no_root() -> Subject:
    return norm(lambda x: centred(x) / (x.var(dim=-1, keepdim=True, unbiased=False) + EPS))


@fault(
    "norm-mean-kept",
    "A LayerNorm that does not subtract the mean",
    killed_by=("norm.shift-invariance", "norm.definition"),
    cause="mean over the channels",
)
def mean_kept() -> Subject:
    return norm(lambda x: x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt())


@fault(
    "norm-mean-removed",
    "An RMSNorm that subtracts the mean",
    killed_by=("norm.shift-invariance",),
    cause="RMSNorm does not subtract the mean",
)
def mean_removed() -> Subject:
    return norm(lambda x: centred(x) / (x.var(dim=-1, keepdim=True, unbiased=False) + EPS).sqrt(), "rms")


@fault("norm-no-eps", "No eps", killed_by=("norm.constant-input",), cause="channels 0.0")
def no_eps() -> Subject:
    return norm(lambda x: centred(x) / x.var(dim=-1, keepdim=True, unbiased=False).sqrt())


@fault(
    "norm-wrong-zero", "A token of zeros is given ones", killed_by=("norm.constant-input",), cause="a token of zeros"
)
def wrong_zero() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        y = centred(x) / (x.var(dim=-1, keepdim=True, unbiased=False) + EPS).sqrt()
        return torch.where((x == 0).all(dim=-1, keepdim=True), 1.0, y)

    return norm(normalise)


@fault(
    "NM12",
    "Sum of squares accumulated in the input's own half precision",
    killed_by=("norm.half-precision",),
    cause="float16",
)
def narrow_sum() -> Subject:
    return norm(lambda x: x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + EPS), "rms")


@fault(
    "norm-detached", "Mean and variance cut off from the gradient", killed_by=("norm.jacobian",), cause="cuts the graph"
)
def detached() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        mean, variance = x.mean(dim=-1, keepdim=True), x.var(dim=-1, keepdim=True, unbiased=False)
        return (x - mean.detach()) / (variance.detach() + EPS).sqrt()

    return norm(normalise)


@fault(
    "norm-inplace",
    "In bfloat16, where no cast makes a copy, the mean is subtracted in place",
    killed_by=("norm.no-inplace",),
    cause="in-place",
)
def in_place() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.bfloat16 else x.clone()
        with torch.no_grad():
            wide -= wide.mean(dim=-1, keepdim=True)
        return wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt()

    return norm(normalise)

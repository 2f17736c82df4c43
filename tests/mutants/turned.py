"""Faults of what is turned or moved by the wrong number: heads, keys turned twice, shifts, masks of other blocks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put

Turn = Callable[[Tensor], Tensor]


def _rotated(x: Tensor, axis: int) -> Tensor:
    """Turn `[B, T, H, K]` by the place along an axis, halves as pairs."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(x.shape[axis], dtype=torch.float64, device=x.device)[:, None] * rates
    angle = angle[:, None] if axis == 1 else angle
    one, two = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class _Rotary(nn.Module):
    """Causal attention of one layer."""

    def __init__(self, c: DrawnConfig, queries: Turn, keys: Turn) -> None:
        super().__init__()
        self.heads, self.queries, self.keys = c.num_heads, queries, keys
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.out = nn.Linear(c.d_model, c.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = self.queries(q), self.keys(k)
        scores = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.out(torch.einsum("bhts,bshk->bthk", weights, v).flatten(2))


def _of_positions(x: Tensor) -> Tensor:
    return _rotated(x, 1)


def _with_rotary(queries: Turn, keys: Turn) -> Subject:
    return Subject(
        kind="self_attention", build=lambda c: _Rotary(c, queries, keys), forward=lambda m, x: m(x),
        declares={"causal": True, "positions": "rotary", "layout": "halves"}, domain={"num_heads": [2]},
    )  # fmt: skip


@fault(
    "RO-heads-axis",
    "Queries and keys are turned along the axis of the heads: by the number of their head, not by their position",
    killed_by=("anatomy.positions",),
    cause="turned by the number of their head",
)
def turned_by_the_head() -> Subject:
    turn = put(lambda x: _rotated(x, 2), instead_of=_of_positions)
    return _with_rotary(turn, turn)


@fault(
    "RO-keys-twice",
    "Keys are turned again though they are turned already",
    killed_by=("anatomy.positions",),
    cause="keys are turned twice",
)
def keys_are_turned_twice() -> Subject:
    return _with_rotary(_of_positions, put(lambda x: _of_positions(_of_positions(x)), instead_of=_of_positions))


def _shifted(x: Tensor) -> Tensor:
    """Bring `[B, H, T, 2T - 1]`, by distance T - 1 to 1 - T, to the keys of each query: the trick of a column more."""
    b, h, t, n = x.shape
    moved = F.pad(x, (1, 0)).view(b, h, n + 1, t)[:, :, 1:].reshape(b, h, t, n)
    return moved[..., :t]


class _Relative(nn.Module):
    """Attention to both sides with scores by distance, as in Transformer-XL."""

    def __init__(self, c: DrawnConfig, last: Callable[[int], int]) -> None:
        super().__init__()
        self.heads, self.width, self.last = c.num_heads, c.d_model, last
        self.qkv = nn.Linear(c.d_model, 3 * c.d_model, bias=False)
        self.far = nn.Linear(c.d_model, c.d_model, bias=False)
        self.out = nn.Linear(c.d_model, c.d_model, bias=False)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        t = x.shape[1]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        distance = torch.arange(t - 1, self.last(t) - 1, -1, device=x.device, dtype=torch.float64)
        angle = distance[:, None] / 10000.0 ** (torch.arange(0, self.width, 2, device=x.device) / self.width)
        table = torch.cat([angle.sin(), angle.cos()], -1)[:, : self.width].to(x.dtype)
        rows = self.far(table).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        scores = q @ k.mT + _shifted(q @ rows.mT)
        scores = scores * q.shape[-1] ** -0.5
        if keep is not None:
            scores = scores.masked_fill(~keep[:, None, None], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@fault(
    "RE-past-alone",
    "Distances of the past alone are made, though attention sees both sides: the shift reads another query's row",
    killed_by=("padding.amount-irrelevant", "attention.masked-equals-removed"),
    cause="out of the row of another query",
)
def distances_of_the_past_alone() -> Subject:
    last = put(lambda t: 0, instead_of=lambda t: 1 - t)

    return Subject(
        kind="self_attention", build=lambda c: _Relative(c, last), mask_forms=("padding",),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "relative"},
    )  # fmt: skip


class _Blocks(nn.Module):
    """Attention within blocks of four and to the block before, with a padding mask."""

    size = 4

    def __init__(self, c: DrawnConfig, mask_before: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.mask_before = c.num_heads, mask_before
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model, bias=False), nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        (b, t, _), w = x.shape, self.size
        keep = torch.ones(b, t, dtype=torch.bool, device=x.device) if keep is None else keep
        x, keep = F.pad(x, (0, 0, 0, -t % w)), F.pad(keep, (0, -t % w))
        q, k, v = self.qkv(x).view(b, -1, w, 3, self.heads, x.shape[-1] // self.heads).unbind(3)
        k, v = (torch.cat([_block_before(z), z], 2) for z in (k, v))
        keep = keep.view(b, -1, w)
        seen = torch.cat([self.mask_before(keep), keep], 2)
        place = torch.arange(2 * w, device=x.device)
        band = (place[None] <= place[w:, None]) & (place[w:, None] - place[None] < w)
        allowed = (band & seen[:, :, None])[:, :, None]
        scores = torch.einsum("bnihk,bnjhk->bnhij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        return self.out(torch.einsum("bnhij,bnjhk->bnihk", weights, v).reshape(b, -1, x.shape[-1])[:, :t])


def _block_before(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


@fault(
    "PM-blocks-before",
    "The padding mask is lost for the keys of the block before: all of them count as real",
    killed_by=("padding.left", "padding.every-position-hides"),
    cause="hidden keys of blocks beside the query's own are seen",
)
def mask_lost_for_the_block_before() -> Subject:
    def all_real(keep: Tensor) -> Tensor:
        return _block_before(torch.ones_like(keep))

    before = put(all_real, instead_of=_block_before)
    return Subject(
        kind="self_attention", build=lambda c: _Blocks(c, before), mask_forms=("padding",),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": True, "window": 4, "positions": "none", "empty_row": "zeros"},
    )  # fmt: skip


@fault(
    "NM-lanes",
    "Rows are filled up with zeros to a multiple of 16, which count in the variance once the mean is subtracted",
    killed_by=("norm.definition", "norm.statistics"),
    cause="filled up with zeros to a multiple of 16",
)
def lanes_count_in_the_variance() -> Subject:
    centred = put(lambda row, real, mean: row - mean, instead_of=lambda row, real, mean: (row - mean) * real)

    class Norm(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(c.d_model)), nn.Parameter(torch.zeros(c.d_model))

        def forward(self, x: Tensor) -> Tensor:
            width = x.shape[-1]
            row = F.pad(x, (0, -width % 16))
            real = torch.arange(row.shape[-1], device=x.device) < width
            mean = row.sum(-1, keepdim=True) / width
            variance = centred(row, real, mean).square().sum(-1, keepdim=True) / width
            return (x - mean) / (variance + 1e-5).sqrt() * self.weight + self.bias

    return Subject(kind="norm", build=Norm, forward=lambda m, x: m(x), declares={"norm": "layer"})


@fault(
    "FF-cubic-factor",
    "The backward of the tanh form of GELU, written by hand, leaves out the 3 of the derivative of a x^3",
    killed_by=("gradients.gradcheck",),
    cause="the factor 3 of the derivative of a x^3 is missing",
)
def cubic_without_its_factor() -> Subject:
    times = put(1.0, instead_of=3.0)
    a, c = 0.044715, math.sqrt(2 / math.pi)

    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
            ctx.save_for_backward(x, bias)
            return F.gelu(x + bias, approximate="tanh")

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, bias = ctx.saved_tensors
            x = x + bias
            tanh = torch.tanh(c * (x + a * x**3))
            slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * c * (1 + times * a * x**2)
            return gradient * slope, (gradient * slope).sum(tuple(range(x.ndim - 1)))

    class Network(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(Gelu.apply(F.linear(x, self.up.weight), self.up.bias))

    return Subject(
        kind="feed_forward", build=Network, forward=lambda m, x: m(x),
        declares={"activation": "gelu_tanh", "bias": True, "once_differentiable": True},
    )  # fmt: skip

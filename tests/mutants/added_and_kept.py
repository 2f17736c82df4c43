"""Faults of what is added, or kept under another name: angles of blocks, shares of smoothing, branches, maxima."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put, put_class

_BLOCK, _TILE, _IGNORED, _SMOOTHING = 8, 4, -100, 0.1


@fault(
    "PE-angle-difference",
    "Sinusoids of blocks and of places in them are joined with a sign of the addition theorem turned round",
    killed_by=("sinusoidal.definition",),
    cause="the cosine of a - b in the place of a + b",
)
def cosine_of_the_difference() -> Subject:
    joined: Callable[[Tensor, Tensor], Tensor] = put(lambda x, y: x + y, instead_of=lambda x, y: x - y)

    def forward(width: int, length: int) -> Tensor:
        omega = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        position = torch.arange(length)
        inside = (position % _BLOCK)[:, None] * omega
        begins = position[:, None] * omega - inside
        sine = begins.sin() * inside.cos() + begins.cos() * inside.sin()
        cosine = joined(begins.cos() * inside.cos(), begins.sin() * inside.sin())
        return torch.stack([sine, cosine], -1).flatten(1)[:, :width].float()

    return Subject(
        kind="positions", build=lambda c: _Width(c.d_model), forward=lambda m, length: forward(m.width, length),
        declares={"positions": "sinusoidal", "layout": "interleaved"},
    )  # fmt: skip


class _Width(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width


@fault(
    "LS-smoothing-of-tiles",
    "The share of smoothing is spread over the vocabulary rounded up to whole tiles",
    killed_by=("loss.definition",),
    cause="the sum of logits in the smoothing term is divided by",
)
def smoothed_over_whole_tiles() -> Subject:
    size: Callable[[int], int] = put(lambda v: -(-v // _TILE) * _TILE, instead_of=lambda v: v)

    def forward(model: None, logits: Tensor, labels: Tensor) -> Tensor:
        rows, wanted = logits.flatten(0, -2), labels.flatten()
        counted = wanted != _IGNORED
        wide = rows if rows.dtype == torch.float64 else rows.float()
        label = wide.gather(1, wanted.clamp(min=0)[:, None])[:, 0]
        each = wide.logsumexp(1) - (1 - _SMOOTHING) * label
        each = each - _SMOOTHING * wide.sum(1) / size(wide.shape[1])
        return (each * counted).sum() / counted.sum().clamp(min=1)

    return Subject(
        kind="loss", forward=forward,
        declares={"ignore_index": _IGNORED, "label_smoothing": _SMOOTHING, "empty_loss": "zero"},
    )  # fmt: skip


class _DropPath(nn.Module):
    """Keeps the branches of whole samples of `[T, B, D]`; it holds the share that it keeps."""

    axis = 1

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.keep = 1.0 - rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.keep == 1.0:
            return x
        shape = [n if axis == self.axis else 1 for axis, n in enumerate(x.shape)]
        return x * x.new_empty(shape).bernoulli_(self.keep) / self.keep


class _TimeFirst(nn.Module):
    def __init__(self, c: DrawnConfig, drop: type[_DropPath]) -> None:
        super().__init__()
        self.up, self.down, self.drop_path = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model), drop(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        return (x + self.drop_path(self.down(self.up(x).relu()))).transpose(0, 1)


@fault(
    "droppath-kept-over-time",
    "Stochastic depth, which holds the share that it keeps, drops steps of time",
    killed_by=("droppath.expectation",),
    cause="for each step of time",
)
def kept_over_time() -> Subject:
    class DropPathOverTime(_DropPath):
        axis = 0

    drop = put_class(DropPathOverTime)
    return Subject(kind="feed_forward", build=lambda c: _TimeFirst(c, drop), declares={"structure": "other"})


@fault(
    "SM-one-maximum-clamped",
    "The largest of all scores is subtracted from every row, and a sum that underflows is divided as if it were tiny",
    killed_by=("softmax.long-rows",),
    cause="one maximum is subtracted from all rows",
)
def one_maximum_and_a_clamp() -> Subject:
    largest: Callable[[Tensor, int], Tensor] = put(
        lambda x, dim: x.amax(), instead_of=lambda x, dim: x.amax(dim, keepdim=True)
    )

    def forward(model: None, scores: Tensor, dim: int) -> Tensor:
        weights = (scores - largest(scores, dim)).exp()
        return weights / weights.sum(dim, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)

    return Subject(kind="softmax", forward=forward)


@fault(
    "SC-little-rises",
    "Sums are not rescaled where a block raises the maximum by little, and that block stands below the new one",
    killed_by=("attention.tiles",),
    cause="is not rescaled where a block raises the maximum",
)
def little_rises_are_not_rescaled() -> Subject:
    stays: Callable[[Tensor, Tensor, Tensor], Tensor] = put(
        lambda new, old, grows: new, instead_of=lambda new, old, grows: torch.where(grows, new, old)
    )

    def attend(model: None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total, found = torch.zeros_like(top), q.new_zeros(*q.shape[:-1], v.shape[-1])
        for keys, values in zip(k.split(2 * _BLOCK, 2), v.split(2 * _BLOCK, 2), strict=True):
            scores = q @ keys.mT * q.shape[-1] ** -0.5
            new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            grows = new - top > 8.0
            factor = torch.where(grows, (top - new).exp(), torch.ones_like(top))
            top = stays(new, top, grows)
            weights = (scores - top).exp()
            total, found = total * factor + weights.sum(-1, keepdim=True), found * factor + weights @ values
        return found / total

    return Subject(kind="attention", forward=attend)

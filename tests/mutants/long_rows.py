"""Faults that show in long rows alone: blocks of entries, of tokens, of a vocabulary, of channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put
from veriformer.tests.mutants.normalization import EPS, norm


def _softmax(function: Callable[[Tensor], Tensor]) -> Subject:
    function = put(function, instead_of=lambda x: x.softmax(-1))
    return Subject(kind="softmax", forward=lambda m, scores, dim=-1: function(scores.movedim(dim, -1)).movedim(-1, dim))


@fault(
    "SR-tail",
    "The sum of a softmax runs over whole blocks of 1024 entries; what is left after the last one is not summed",
    killed_by=("softmax.long-rows",),
    cause="a last block of 1024 that is not full",
)
def tail_not_summed() -> Subject:
    def function(x: Tensor) -> Tensor:
        e = (x - x.amax(-1, keepdim=True)).exp()
        whole = x.shape[-1] // 1024 * 1024 or x.shape[-1]
        return e / e[..., :whole].sum(-1, keepdim=True)

    return _softmax(function)


@fault(
    "SR-rescale",
    "A running softmax over blocks of 128 entries does not scale what it has summed where the maximum grows",
    killed_by=("softmax.long-rows",),
    cause="is not rescaled where a block raises the maximum",
)
def not_rescaled() -> Subject:
    def function(x: Tensor) -> Tensor:
        top, total = torch.full_like(x[..., :1], -torch.inf), torch.zeros_like(x[..., :1])
        for block in x.split(128, -1):
            top = torch.maximum(top, block.amax(-1, keepdim=True))
            total = total + (block - top).exp().sum(-1, keepdim=True).nan_to_num(0.0)
        return (x - top).exp() / total

    return _softmax(function)


@fault(
    "SR-hidden-block",
    "A running softmax over blocks of 32 entries meets a first block that is hidden throughout: exp(-inf + inf)",
    killed_by=("softmax.long-rows",),
    cause="rows whose first half is hidden",
)
def hidden_block() -> Subject:
    def function(x: Tensor) -> Tensor:
        top, total = torch.full_like(x[..., :1], -torch.inf), torch.zeros_like(x[..., :1])
        for number, block in enumerate(x.split(32, -1)):
            above = torch.maximum(top, block.amax(-1, keepdim=True))
            kept = total * (top - above).exp() if number else total
            top, total = above, kept + (block - above).exp().sum(-1, keepdim=True)
        return (x - top).exp() / total

    return _softmax(function)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        weights = x.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        return w * (g - (w * g)[..., :256].sum(-1, keepdim=True))  # type: ignore[no-any-return]


@fault(
    "SR-backward",
    "The backward pass of a softmax sums over the first block of 256 entries alone",
    killed_by=("softmax.long-rows",),
    cause="right up to 256 scores a row, wrong from 257 on|in the backward of",
)
def short_backward() -> Subject:
    return _softmax(lambda x: _Backward.apply(x))  # type: ignore[no-any-return, no-untyped-call]


def _loss(function: Callable[[Tensor, Tensor], Tensor]) -> Subject:
    function = put(function, instead_of=F.cross_entropy)
    return Subject(
        kind="loss",
        forward=lambda m, logits, labels: function(logits.flatten(0, 1), labels.flatten()),
        declares={"shifts_labels": False},
    )


@fault(
    "LC-means",
    "A loss in chunks of 64 tokens takes the mean of the chunks' means",
    killed_by=("loss.definition",),
    cause="means of chunks of 64 tokens",
)
def mean_of_means() -> Subject:
    def function(x: Tensor, y: Tensor) -> Tensor:
        real = y != -100
        x, y = x[real], y[real]
        chunks = [F.cross_entropy(a, b) for a, b in zip(x.split(64), y.split(64), strict=True)]
        return torch.stack(chunks).mean() if len(y) else x.sum() * 0

    return _loss(function)


@fault(
    "LC-empty",
    "A loss in chunks of 64 tokens counts one token of a chunk without labels",
    killed_by=("loss.definition",),
    cause="wrong where none of the tokens",
)
def empty_chunk() -> Subject:
    def function(x: Tensor, y: Tensor) -> Tensor:
        counts = [(chunk != -100).sum().clamp(min=1) for chunk in y.split(64)]
        return F.cross_entropy(x, y, reduction="sum") / torch.stack(counts).sum()

    return _loss(function)


@fault(
    "LC-vocabulary",
    "The log-sum-exp of a loss runs over whole blocks of 512 ids; what is left after the last one is left out",
    killed_by=("loss.definition",),
    cause="a last block of 512 that is not full",
)
def vocabulary_tail() -> Subject:
    def function(x: Tensor, y: Tensor) -> Tensor:
        whole = x.shape[-1] // 512 * 512 or x.shape[-1]
        real = y != -100
        taken = x.gather(-1, y.masked_fill(~real, 0)[:, None])[:, 0]
        terms = x[:, :whole].logsumexp(-1) - taken
        return terms.masked_fill(~real, 0).sum() / real.sum().clamp(min=1)

    return _loss(function)


@fault(
    "NR-merge",
    "A norm puts the variances of blocks of 256 channels together without the distance of their means",
    killed_by=("norm.definition",),
    cause="right up to 256 channels, wrong from 257 on",
)
def merged_variances() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        blocks = x.split(256, -1)
        squares = sum(((b - b.mean(-1, keepdim=True)) ** 2).sum(-1, keepdim=True) for b in blocks)
        return (x - x.mean(-1, keepdim=True)) / (squares / x.shape[-1] + EPS).sqrt()

    return norm(normalise)


@fault(
    "NR-weights",
    "The mean of a norm is the mean of the means of blocks of 128 channels, whether or not the last is full",
    killed_by=("norm.definition",),
    cause="a last block of 128 that is not full",
)
def mean_of_blocks() -> Subject:
    def normalise(x: Tensor) -> Tensor:
        mean = torch.stack([b.mean(-1, keepdim=True) for b in x.split(128, -1)]).mean(0)
        return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + EPS).sqrt()

    return norm(normalise)


class Chunked(nn.Module):
    """Two maps and a ReLU; `run` computes it."""

    def __init__(self, config: DrawnConfig, run: Callable[[Chunked, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.d_model, config.d_ff), nn.Linear(config.d_ff, config.d_model)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x.flatten(0, -2)).view_as(x)

    def plainly(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))  # type: ignore[no-any-return]


def _chunked(run: Callable[[Chunked, Tensor], Tensor]) -> Subject:
    run = put(run, instead_of=Chunked.plainly)
    return Subject(
        kind="feed_forward", build=lambda c: Chunked(c, run), forward=lambda m, x: m(x),
        declares={"activation": "relu", "bias": True},
    )  # fmt: skip


@fault(
    "FC-tail",
    "A feed-forward network in chunks of 64 tokens leaves zeros where the last one is not full",
    killed_by=("ffn.position-wise", "ffn.definition"),
    cause="a last block of 64 that is not full",
)
def token_tail() -> Subject:
    def run(model: Chunked, x: Tensor) -> Tensor:
        whole = len(x) // 64 * 64 or len(x)
        return torch.cat([model.plainly(x[:whole]), torch.zeros_like(x[whole:])])

    return _chunked(run)


@fault(
    "FC-width",
    "A feed-forward network takes its hidden units in blocks of 256, whole ones alone",
    killed_by=("ffn.definition",),
    cause="a last block of 256 that is not full",
)
def width_tail() -> Subject:
    def run(model: Chunked, x: Tensor) -> Tensor:
        width = model.up.out_features
        whole = width // 256 * 256 or width
        return F.linear(F.relu(model.up(x))[:, :whole], model.down.weight[:, :whole], model.down.bias)

    return _chunked(run)

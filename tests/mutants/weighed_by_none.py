"""Faults of sums and shares: weights summed away, tiles of a row, labels that weigh by number, positions left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault
from veriformer.tests.mutants.mending import put


class _Mixing(nn.Module):
    """Self-attention whose weights meet the values in an einsum."""

    def __init__(self, c: DrawnConfig, equation: str) -> None:
        super().__init__()
        self.heads, self.equation = c.num_heads, equation
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        weights = (torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5).softmax(-1)
        mixed: Tensor = self.out(torch.einsum(self.equation, weights, v).flatten(2))
        return mixed


@fault(
    "AT-summed-away",
    "The values are taken by query, so that the weights are summed to one and nothing is mixed",
    killed_by=("attention.attends",),
    cause="takes their sum alone, which is 1",
)
def weights_summed_away() -> Subject:
    equation: str = put("bhts,bthk->bthk", instead_of="bhts,bshk->bthk")
    return Subject(
        kind="self_attention", build=lambda c: _Mixing(c, equation), forward=lambda m, x: m(x), mask_forms=(),
        declares={"causal": False, "positions": "none"},
    )  # fmt: skip


class _Rows(Function):
    """Softmax over the last axis, with a backward of its own in tiles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tile: int) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        ctx.tile = tile
        return y

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        parts = [y_ * (g_ - (g_ * y_).sum(-1, keepdim=True))
                 for y_, g_ in zip(y.split(ctx.tile, -1), g.split(ctx.tile, -1), strict=True)]  # fmt: skip
        return torch.cat(parts, -1), None


@fault(
    "SM-tile-sums",
    "The backward of a softmax sums over each tile of a row by itself",
    killed_by=("softmax.jacobian",),
    cause="is taken over tiles of 4 entries by themselves",
)
def sums_of_tiles() -> Subject:
    tile: int = put(4, instead_of=1 << 30)
    return Subject(
        kind="softmax", forward=lambda m, x, dim=-1: _Rows.apply(x.movedim(dim, -1), tile).movedim(-1, dim),
        declares={"once_differentiable": True},
    )  # fmt: skip


@fault(
    "SM-sink-unshifted",
    "A sink of 1 stays beside exponentials from which the maximum was taken off",
    killed_by=("softmax.simplex",),
    cause="must be multiplied by exp(-maximum) too",
)
def sink_without_the_maximum() -> Subject:
    sink: Callable[[Tensor], Any] = put(lambda top: 1.0, instead_of=lambda top: (-top).exp())

    def softmax(m: Any, x: Tensor, dim: int = -1) -> Tensor:
        top = x.amax(dim, keepdim=True).clamp(min=0)
        weights = (x - top).exp()
        return weights / (sink(top) + weights.sum(dim, keepdim=True))

    return Subject(kind="softmax", forward=softmax, declares={"sink": True, "half_precision": False})


@fault(
    "LS-weighed-by-size",
    "Micro-batches are weighed by all their labels, those that do not count among them",
    killed_by=("loss.accumulation",),
    cause="weighed by the number of all labels",
)
def weighed_by_size() -> Subject:
    count: Callable[[Tensor], Any] = put(lambda y: y.numel(), instead_of=lambda y: (y != -100).sum())

    def accumulate(m: Any, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        total = sum(F.cross_entropy(x.flatten(0, 1), y.flatten()) * count(y) for x, y in batches)
        many: Tensor = total / sum(count(y) for _, y in batches)
        return many

    return Subject(
        kind="loss", forward=lambda m, x, y: F.cross_entropy(x.flatten(0, 1), y.flatten()), accumulate=accumulate,
    )  # fmt: skip


class _TwoDoors(nn.Module):
    """A small encoder that takes tokens, or their embeddings."""

    def __init__(self, c: DrawnConfig, place: Callable[[_TwoDoors, Tensor], Tensor]) -> None:
        super().__init__()
        self.place = place
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, dropout=0.0, batch_first=True)

    def added(self, x: Tensor) -> Tensor:
        return x + self.positions.weight[: x.shape[1]]

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.layer(self.added(self.tokens(tokens)))
        return y

    def embedded(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.place(self, x))
        return y


@fault(
    "EM-no-positions",
    "A model that is given embeddings leaves the positions out",
    killed_by=("embedding.entry",),
    cause="are not added at this door",
)
def positions_left_out() -> Subject:
    place: Callable[[_TwoDoors, Tensor], Tensor] = put(lambda m, x: x, instead_of=lambda m, x: m.added(x))
    return Subject(
        kind="encoder", build=lambda c: _TwoDoors(c, place), forward=lambda m, tokens: m(tokens), mask_forms=(),
        embed=lambda m, x: m.embedded(x), declares={"positions": "learned", "norm_placement": "post"},
    )  # fmt: skip


class _Dropping(Function):
    """Dropout with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, divides: bool) -> Tensor:
        kept = torch.rand_like(x) >= rate
        ctx.save_for_backward(kept)
        ctx.share = 1 - rate if divides else 1.0
        return x * kept / (1 - rate)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        (kept,) = ctx.saved_tensors
        return g * kept / ctx.share, None, None


class _Dropped(nn.Module):
    """A feed-forward network that drops by a function of its own."""

    def __init__(self, c: DrawnConfig, divides: bool) -> None:
        super().__init__()
        self.rate, self.divides = c.dropout, divides
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(x))
        if self.training and self.rate:
            y = _Dropping.apply(y, self.rate, self.divides)
        made: Tensor = self.down(y)
        return made


@fault(
    "DR-share-forgotten",
    "The backward of dropout does not divide what is kept by 1 - p",
    killed_by=("dropout.gradient",),
    cause="does not divide what is kept by 1 - p",
)
def share_forgotten() -> Subject:
    divides: bool = put(False, instead_of=True)
    return Subject(
        kind="feed_forward", build=lambda c: _Dropped(c, divides), forward=lambda m, x: m(x),
        declares={"activation": "gelu", "once_differentiable": True},
    )  # fmt: skip


class _Words:
    """Splits a text at its blanks and gives each word the bytes that it has, kept by word."""

    def __init__(self, key: Callable[[str], str]) -> None:
        self.key, self.kept = key, dict[str, list[int]]()

    def encode(self, text: str) -> list[int]:
        words = [w for part in text.split(" ") for w in (" ", part)][1:]
        joined = ["".join(words[max(i - 1, 0) : i + 1]) for i in range(0, len(words), 2)]
        found = []
        for word in joined:
            found += self.kept.setdefault(self.key(word), list(word.encode()))
        return found


@fault(
    "TK-word-without-blank",
    "What is kept of a word is found by the word without the blank before it",
    killed_by=("tokenizer.round-trip",),
    cause="by the word without the blank before it",
)
def words_found_without_their_blank() -> Subject:
    key: Callable[[str], str] = put(lambda word: word.removeprefix(" "), instead_of=lambda word: word)
    return Subject(
        kind="tokenizer", build=lambda c: _Words(key), forward=lambda m, text: m.encode(text),
        decode=lambda m, ids: bytes(ids).decode(errors="replace"), declares={"reversible": True},
    )  # fmt: skip

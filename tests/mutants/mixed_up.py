"""Faults of one thing put in another's place: axes of a draw, ids, norms, maxima, positions of packed samples."""

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
from veriformer.tests.mutants.objectives import masking


class _Encoder(nn.Module):
    """An encoder of torch's own attention, post-norm, with what a fault may change handed in."""

    def __init__(self, c: DrawnConfig, add: Callable[..., Tensor], drop: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.add, self.drop, self.rate = add, drop, c.dropout
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.attention = nn.ModuleList(nn.MultiheadAttention(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.up = nn.ModuleList(nn.Linear(c.d_model, c.d_ff) for _ in range(c.num_layers))
        self.down = nn.ModuleList(nn.Linear(c.d_ff, c.d_model) for _ in range(c.num_layers))
        self.first = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.second = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))

    def dropped(self, y: Tensor) -> Tensor:
        return self.drop(y, self.rate, self.training) if self.drop else y

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        x = x.transpose(0, 1)
        for attention, up, down, first, second in zip(
            self.attention, self.up, self.down, self.first, self.second, strict=True
        ):
            x = first(x + self.dropped(attention(x, x, x, need_weights=False)[0]))
            x = self.add(second, x, self.dropped(down(F.gelu(up(x)))))
        return x.transpose(0, 1)


def _behind_the_sum(norm: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return norm(x + y)


@fault(
    "RS-norm-of-branch",
    "One of two sublayers has its norm in front of the sum, and so of the branch alone",
    killed_by=("twin.equal",),
    cause="what a sublayer gives is normed, and then added",
)
def norm_of_the_branch() -> Subject:
    add = put(lambda norm, x, y: x + norm(y), instead_of=_behind_the_sum)
    return Subject(
        kind="encoder", build=lambda c: _Encoder(c, add), forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "post",
                  "activation": "gelu"},
    )  # fmt: skip


@fault(
    "DP-time-first",
    "Stochastic depth draws along the first axis, which is time: branches are dropped for positions of all samples",
    killed_by=("droppath.expectation",),
    cause="the axis that the draw has is that of time",
)
def dropped_by_time() -> Subject:
    shape = put(lambda x: (x.shape[0], 1, 1), instead_of=lambda x: (1, x.shape[1], 1))

    def drop(x: Tensor, rate: float, training: bool) -> Tensor:
        if not training or not rate:
            return x
        return x * (torch.rand(shape(x)) >= rate) / (1 - rate)

    return Subject(
        kind="encoder", build=lambda c: _Encoder(c, _behind_the_sum, drop), forward=lambda m, tokens: m(tokens),
        mask_forms=(), declares={"causal": False, "positions": "learned", "norm_placement": "post"},
    )  # fmt: skip


@fault(
    "MS-ids-of-positions",
    "Random ids are drawn below the length of the sequence, not below the size of the vocabulary",
    killed_by=("masking.mlm",),
    cause="drawn below the length of the sequence",
)
def ids_below_the_length() -> Subject:
    def forward(m: Any, tokens: Tensor, seed: int) -> Any:
        own = torch.Generator().manual_seed(seed)
        chosen = (torch.rand(tokens.shape, generator=own) < 0.15) & (tokens > 4)
        fate, words = (
            torch.rand(tokens.shape, generator=own),
            torch.randint(tokens.shape[1], tokens.shape, generator=own),
        )
        inputs = torch.where(chosen & (fate < 0.8), 4, tokens)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), words, inputs)
        return inputs, torch.where(chosen, tokens, -100)

    return masking(forward)


@fault(
    "EM-patches-of-a-channel",
    "The channels are not moved behind the grid: a token is made of several patches of one channel",
    killed_by=("embedding.patches",),
    cause="not of one patch of all 3",
)
def patches_of_one_channel() -> Subject:
    moved = put(lambda x: x, instead_of=lambda x: x.permute(0, 2, 3, 1, 4, 5))

    class Images(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.map = nn.Linear(3 * 16, c.d_model)
            self.layer = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)

        def tokens(self, images: Tensor) -> Tensor:
            x = images.unfold(2, 4, 4).unfold(3, 4, 4)
            return self.map(moved(x).reshape(len(x), x.shape[2] * x.shape[3], -1))

    return Subject(
        kind="layer", build=Images, forward=lambda m, x: m.layer(x), patches=lambda m, images: m.tokens(images),
        image=(3, 8, 12), declares={"causal": False},
    )  # fmt: skip


@fault(
    "SM-maximum-of-last-axis",
    "The maximum that is subtracted is that of the last axis, whatever the axis of the softmax",
    killed_by=("softmax.axis", "softmax.long-rows"),
    cause="the maximum that is subtracted runs over the last axis",
)
def maximum_of_the_last_axis() -> Subject:
    axis = put(lambda dim: -1, instead_of=lambda dim: dim)

    def softmax(m: None, x: Tensor, dim: int) -> Tensor:
        top = x.amax(axis(dim), keepdim=True)
        p = (x - top.masked_fill(top == -torch.inf, 0.0)).exp()
        return p / p.sum(dim, keepdim=True)

    return Subject(kind="softmax", forward=softmax, declares={"empty_row": "nan", "half_precision": False})


class _Packed(nn.Module):
    """An encoder of one layer whose samples are packed into one row, without their padding."""

    def __init__(self, c: DrawnConfig, places: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.places = c.num_heads, places
        self.embed, self.place = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        lengths = mask.sum(1)
        whose = torch.arange(len(tokens), device=tokens.device).repeat_interleave(lengths)
        x = self.embed(tokens[mask]) + self.place(self.places(lengths))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        seen = whose[:, None] == whose[None]
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1).flatten(1))
        out = x.new_zeros(*tokens.shape, x.shape[-1])
        out[mask] = x
        return out


@fault(
    "PE-packed-modulo",
    "Positions of packed samples begin again every longest sample, not where samples begin",
    killed_by=("batch.permutation", "padding.amount-irrelevant"),
    cause="they begin again every 6 tokens, the longest sample's",
)
def positions_modulo_the_longest() -> Subject:
    def right(lengths: Tensor) -> Tensor:
        return torch.cat([torch.arange(int(n), device=lengths.device) for n in lengths])

    def modulo(lengths: Tensor) -> Tensor:
        return torch.arange(int(lengths.sum()), device=lengths.device) % lengths.max()

    places = put(modulo, instead_of=right)
    return Subject(
        kind="encoder", build=lambda c: _Packed(c, places), mask_forms=("padding",),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False, "positions": "learned", "structure": "other"},
    )  # fmt: skip


@fault(
    "RS-centred-in-place",
    "A norm subtracts the mean from its input in place, and its input is the stream",
    killed_by=("residual.identity",),
    cause="changes what it is given, in place",
)
def norm_centres_in_place() -> Subject:
    centred = put(lambda x: x.sub_(x.mean(-1, keepdim=True)), instead_of=lambda x: x - x.mean(-1, keepdim=True))

    class Norm(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            x = centred(x)
            return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * self.weight + self.bias

    class Layer(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.norm, self.up, self.down = Norm(c.d_model), nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
            self.attend, self.first = nn.MultiheadAttention(c.d_model, c.num_heads, batch_first=True), Norm(c.d_model)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            y = self.first(x)
            x = x + self.attend(y, y, y, need_weights=False)[0]
            return x + self.down(F.gelu(self.up(self.norm(x))))

    return Subject(
        kind="layer", build=Layer, forward=lambda m, x: m(x),
        declares={"causal": False, "norm_placement": "pre", "activation": "gelu"},
    )  # fmt: skip

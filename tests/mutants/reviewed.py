"""Faults that strangers put into their reviews: what attention gives is lost, carried on, or scaled by a part."""

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


class _Attention(nn.Module):
    """Self-attention over heads, with something added to its scores."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads = c.num_heads
        self.qkv, self.out = (
            nn.Linear(c.d_model, 3 * c.d_model, bias=False),
            nn.Linear(c.d_model, c.d_model, bias=False),
        )

    def forward(self, x: Tensor, bias: Tensor | None = None, scale: float | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        weights = (scores if bias is None else self.added(scores, bias)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def added(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias


class Block(nn.Module):
    """A pre-norm layer; its two sums can be given another place to start from."""

    def __init__(self, c: DrawnConfig, attention: type[nn.Module] = _Attention) -> None:
        super().__init__()
        self.attention, self.norm1, self.norm2 = attention(c), nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def branch(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm2(x))))


@fault(
    "RS-attention-lost",
    "What attention gives is seen by the feed-forward network and not added to the stream",
    killed_by=("residual.placement",),
    cause="what attention gives is lost from the stream",
)
def attention_is_lost() -> Subject:
    def from_before(x: Tensor, attended: Tensor) -> Tensor:
        return x

    def from_behind(x: Tensor, attended: Tensor) -> Tensor:
        return attended

    start = put(from_before, instead_of=from_behind)

    class Layer(Block):
        def forward(self, x: Tensor) -> Tensor:
            attended = x + self.attention(self.norm1(x))
            return start(x, attended) + self.branch(attended)

    return Subject(
        kind="layer", build=Layer, forward=lambda m, x: m(x), mask_forms=(),
        declares={"norm_placement": "pre", "norm": "layer", "causal": False, "positions": "none"},
    )  # fmt: skip


class DropPath(nn.Module):
    """Drops whole samples."""

    def __init__(self, drop_prob: float) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.drop_prob:
            return x
        kept = x.new_empty(len(x), *[1] * (x.ndim - 1)).bernoulli_(1 - self.drop_prob)
        return x * kept / (1 - self.drop_prob)


@fault(
    "droppath-stream",
    "Stochastic depth acts on the sum of a branch and the stream: a dropped sample loses all that it was",
    killed_by=("droppath.expectation",),
    cause="acts on the sum of a branch and the stream",
)
def stream_is_dropped() -> Subject:
    def whole(drop: nn.Module, x: Tensor, branch: Tensor) -> Tensor:
        return drop(x + branch)  # type: ignore[no-any-return]

    def of_branch(drop: nn.Module, x: Tensor, branch: Tensor) -> Tensor:
        return x + drop(branch)  # type: ignore[no-any-return]

    joined: Callable[[nn.Module, Tensor, Tensor], Tensor] = put(whole, instead_of=of_branch)

    class Layer(Block):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__(c)
            self.drop1, self.drop2 = DropPath(c.dropout), DropPath(c.dropout)

        def forward(self, x: Tensor) -> Tensor:
            x = joined(self.drop1, x, self.attention(self.norm1(x)))
            return joined(self.drop2, x, self.branch(x))

    class Encoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.layers, self.norm = nn.ModuleList(Layer(c) for _ in range(c.num_layers)), nn.LayerNorm(c.d_model)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            return self.norm(x)  # type: ignore[no-any-return]

    return Subject(
        kind="encoder", build=Encoder, forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"norm_placement": "pre", "positions": "learned", "causal": False},
    )  # fmt: skip


@fault(
    "SC-carried",
    "Scores are added in place to the bias that all layers share: a layer's scores hold those of all before",
    killed_by=("anatomy.softmax",),
    cause="written to in place",
)
def scores_are_carried() -> Subject:
    def in_place(scores: Tensor, bias: Tensor) -> Tensor:
        return bias.add_(scores)

    added = put(in_place, instead_of=torch.add)

    class Shared(_Attention):
        def added(self, scores: Tensor, bias: Tensor) -> Tensor:
            return added(scores, bias)  # type: ignore[no-any-return]

    class Encoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.table = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(32, c.num_heads)
            self.layers = nn.ModuleList(Block(c, Shared) for _ in range(c.num_layers))

        def forward(self, tokens: Tensor) -> Tensor:
            place = torch.arange(tokens.shape[1])
            far = (place[None] - place[:, None]).clamp(-15, 15) + 16
            bias = self.table(far).permute(2, 0, 1)[None].repeat(len(tokens), 1, 1, 1)
            x = self.tokens(tokens)
            for layer in self.layers:
                x = x + layer.attention(layer.norm1(x), bias)
                x = x + layer.branch(x)
            return x

    return Subject(
        kind="encoder", build=Encoder, forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"norm_placement": "pre", "positions": "relative", "causal": False},
    )  # fmt: skip


@fault(
    "SC-part-of-head",
    "Heads are put together of a content part and one that all share, and scaled by the width of the first",
    killed_by=("anatomy.scale",),
    cause="of one of their parts alone",
)
def scale_of_a_part() -> Subject:
    of_part = put(True, instead_of=False)

    class Latent(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.heads, self.part, self.more = c.num_heads, c.d_head, 2
            self.q = nn.Linear(c.d_model, c.num_heads * (c.d_head + 2), bias=False)
            self.down = nn.Linear(c.d_model, c.d_head + 2, bias=False)
            self.up = nn.Linear(c.d_head, 2 * c.num_heads * c.d_head, bias=False)
            self.out = nn.Linear(c.num_heads * c.d_head, c.d_model, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            latent, shared = self.down(x).split((self.part, self.more), dim=-1)
            k, v = self.up(latent).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
            k = torch.cat([k, shared[:, None].expand(-1, self.heads, -1, -1)], dim=-1)
            scale = (self.part if of_part else q.shape[-1]) ** -0.5
            return self.out(((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return Subject(
        kind="self_attention", build=Latent, forward=lambda m, x: m(x), mask_forms=(),
        declares={"positions": "none", "causal": False, "structure": "other"},
    )  # fmt: skip


@fault(
    "tied-factorised",
    "Weights of a model with narrow embeddings are drawn anew as new parameters, behind the tie",
    killed_by=("parameters.tied",),
    cause="is broken by it",
)
def narrow_tie_is_broken() -> Subject:
    def renewed(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight = nn.Parameter(torch.randn_like(module.weight) * 0.02)

    def redrawn(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    drawn: Callable[[nn.Module], Any] = put(renewed, instead_of=redrawn)

    class Narrow(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, 6), nn.Embedding(c.max_len, c.d_model)
            self.widen, self.narrow = nn.Linear(6, c.d_model), nn.Linear(c.d_model, 6)
            self.layers, self.head = nn.ModuleList(Block(c) for _ in range(c.num_layers)), nn.Linear(6, c.vocab_size)
            self.head.weight = self.tokens.weight
            self.apply(drawn)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.widen(self.tokens(tokens)) + self.places.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = x + layer.attention(layer.norm1(x))
                x = x + layer.branch(x)
            return self.head(self.narrow(x))  # type: ignore[no-any-return]

    return Subject(
        kind="encoder", build=Narrow, forward=lambda m, tokens: m(tokens), mask_forms=(),
        declares={"norm_placement": "pre", "positions": "learned", "causal": False, "tied": True, "structure": "other"},
    )  # fmt: skip

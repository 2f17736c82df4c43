"""Right implementations with axes and sizes of their own: time first, one shared head, four times d_model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants.kept_and_shared import DropPath, TimeFirst, Translator
from veriformer.tests.traps import trap


def _turned(x: Tensor) -> Tensor:
    """Return heads `[..., T, K]` turned by their positions, halves paired."""
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angles = torch.arange(length, dtype=torch.float64, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class _Shared(nn.Module):
    """A PaLM block: one head of keys and values, without an axis of its own, beside a gated feed-forward network."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads, self.parts = c.num_heads, (c.d_model, c.d_head, c.d_head, 2 * c.d_ff)
        self.norm = nn.LayerNorm(c.d_model)
        self.fused = nn.Linear(c.d_model, sum(self.parts), bias=False)
        self.out, self.down = nn.Linear(c.d_model, c.d_model, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, inner = self.fused(self.norm(x)).split(self.parts, dim=-1)
        q, k = _turned(q.unflatten(-1, (self.heads, -1)).transpose(1, 2)), _turned(k)
        scores = torch.einsum("bhid,bjd->bhij", q, k) / math.sqrt(q.shape[-1])
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
        gate, up = inner.chunk(2, dim=-1)
        heads = torch.einsum("bhij,bjd->bhid", weights, v).transpose(1, 2).flatten(2)
        return x + self.out(heads) + self.down(functional.silu(gate) * up)


class _Model(nn.Module):
    def __init__(self, c: DrawnConfig, layer: Callable[[DrawnConfig], nn.Module], positions: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(c.vocab_size, c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model) if positions else None
        self.layers = nn.ModuleList(layer(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        if self.places is not None:
            x = x + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@trap("style-shared-head", "Keys and values of one shared head have no axis of heads: an einsum stacks the queries")
def shared_head() -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: _Model(c, _Shared, positions=False),
        domain={"d_model": (8, 16), "num_heads": (1, 2, 4)},
        declares={"causal": True, "positions": "rotary", "bias": False, "tied": False, "structure": "other"},
    )


class _Wide(nn.Module):
    """A GPT block with a width of its own, 4 d_model, whatever was drawn."""

    def __init__(self, c: DrawnConfig) -> None:
        super().__init__()
        self.heads, width = c.num_heads, c.d_model
        self.before, self.behind = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.before(x)).chunk(3, -1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        given: Tensor = x + self.down(functional.gelu(self.up(self.behind(x))))
        return given


@trap("style-own-width", "build reads no d_ff: feed-forward networks are four times d_model wide", "karpathy/nanoGPT")
def own_width() -> Subject:
    return Subject(
        kind="decoder",
        build=lambda c: _Model(c, _Wide, positions=True),
        declares={
            "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu",
            "bias": True, "output_bias": False, "tied": False, "init": "default",
        },
    )  # fmt: skip


@trap("style-time-first", "A layer computes [T, B, D] inside: samples are on the second axis of its stochastic depth")
def time_first() -> Subject:
    return Subject(kind="feed_forward", build=lambda c: TimeFirst(c, DropPath), declares={"structure": "other"})


@trap("style-target-cache", "An encoder-decoder decodes through a cache of its memory and of the target so far")
def target_cache() -> Subject:
    return Subject(
        kind="encoder_decoder",
        build=Translator,
        forward=lambda m, source, target: m(source, target),
        cache=lambda m, source, chunks: m.cached(source, chunks),
        declares={"causal": True, "positions": "learned", "structure": "other"},
    )


@trap("style-mask-of-keys", "A kernel that says nothing of its masks takes [B, S] alone")
def mask_of_keys() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, None, None, :], -torch.inf)
        if causal:
            behind = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            scores = scores.masked_fill(~behind, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v

    return Subject(kind="attention", forward=forward, declares={"empty_row": "zeros"})

"""Faults as they stood in public repositories, most of them until their authors mended them, each written anew.

The commit that mended each, or the file where it stands, is its citation; `reports/gallery/repositories.md` has them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.mutants import fault


class Attends(nn.Module):
    """Self-attention of two heads or more with a padding mask `[B, T]`, True = may attend."""

    def __init__(self, width: int, heads: int, rate: float = 0.0) -> None:
        super().__init__()
        self.heads, self.rate = heads, rate
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        weights = self.dropped(self.hidden(q @ k.mT / math.sqrt(q.shape[-1]), attention_mask).softmax(-1))
        return self.out(self.merged(weights @ v))

    def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
        return scores if mask is None else scores.masked_fill(~mask[:, None, None, :], -1e9)

    def dropped(self, weights: Tensor) -> Tensor:
        return F.dropout(weights, self.rate, self.training)

    def merged(self, mixed: Tensor) -> Tensor:
        return mixed.transpose(1, 2).flatten(2)


def attending(cls: type[Attends]) -> Subject:
    return Subject(
        kind="self_attention",
        build=lambda c: cls(c.d_model, c.num_heads, c.dropout),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={"causal": False, "positions": "none"},
    )


@fault(
    "FD-diagonal",
    "An einsum names both indices of the output matrix alike and takes its diagonal",
    killed_by=("parameters.all-used",),
    cause="takes its diagonal",
    citation="alan-cooney/transformer-from-scratch da04294",
)
def diagonal() -> Subject:
    class Diagonal(Attends):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            mixed = F.scaled_dot_product_attention(*self.split(x))
            return torch.einsum("btd,dd->btd", self.merged(mixed), self.out.weight)

        def split(self, x: Tensor) -> list[Tensor]:
            return [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)]

    return Subject(
        kind="self_attention", build=lambda c: _without_bias(Diagonal(c.d_model, c.num_heads)),
        forward=lambda m, x: m(x), mask_forms=(), declares={"causal": False, "positions": "none"},
    )  # fmt: skip


def _without_bias(module: Attends) -> Attends:
    module.out.bias = None
    return module


@fault(
    "FD-merged",
    "Heads are merged without being changed back",
    killed_by=("anatomy.softmax",),
    cause="changed back|merged as it lies",
    citation="pyemma/gpt-from-scratch 65c6688",
)
def merged() -> Subject:
    class Merged(Attends):
        def merged(self, mixed: Tensor) -> Tensor:
            return mixed.contiguous().view(mixed.shape[0], mixed.shape[2], -1)

    return attending(Merged)


@fault(
    "FD-queries",
    "A padding mask hides the padded queries and not the padded keys",
    killed_by=("attention.masked-equals-removed", "padding.content-irrelevant"),
    cause="the weights of real queries are those without a mask|masks queries|rows",
    citation="HarunoriKawano/Pytorch-Transformer b1d9c8c",
)
def queries() -> Subject:
    class Queries(Attends):
        def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return scores if mask is None else scores.masked_fill(~mask[:, None, :, None], -1e9)

    return attending(Queries)


@fault(
    "FD-times",
    "A mask multiplies scores, which leaves hidden keys a score of zero",
    killed_by=("attention.masked-equals-removed", "padding.content-irrelevant"),
    cause="multipl|zero|0",
    citation="vshmyhlo/transformer-pytorch 16ce86a",
)
def times() -> Subject:
    class Times(Attends):
        def hidden(self, scores: Tensor, mask: Tensor | None) -> Tensor:
            return scores if mask is None else scores * mask[:, None, None, :].to(scores.dtype)

    return attending(Times)


@fault(
    "FD-always",
    "The function of dropout is told that it trains, whatever the mode",
    killed_by=("numerics.stateless",),
    cause="dropout acts in eval mode",
    citation="finallyupper/pytorch-transformer model/attention.py",
)
def always() -> Subject:
    class Always(Attends):
        def dropped(self, weights: Tensor) -> Tensor:
            return torch.dropout(weights, 0.1, train=True)

    return attending(Always)


@fault(
    "FD-own-cosines",
    "Cosines have frequencies of their own, between those of the sines",
    killed_by=("anatomy.positions",),
    cause="differ in frequency",
    citation="tanjeffreyz/attention-is-all-you-need 2b21d79",
)
def own_cosines() -> Subject:
    class Encoder(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            at, channel = torch.arange(c.max_len)[:, None], torch.arange(c.d_model)
            angles = at / 10000 ** (channel / c.d_model)
            self.register_buffer("table", torch.where(channel % 2 == 0, angles.sin(), angles.cos()))
            self.tokens = nn.Embedding(c.vocab_size, c.d_model)
            self.body = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.body(self.tokens(tokens) + self.table[: tokens.shape[1]])

    return Subject(kind="encoder", build=Encoder, inputs="tokens", forward=lambda m, x: m(x), mask_forms=())


@fault(
    "FD-uncached",
    "Without its cache a generation goes on from the prompt at every step",
    killed_by=("decoding.generate",),
    cause="newest|forgets|prompt|context",
    citation="deniskurlov/gpt-from-scratch src/model.py",
)
def uncached() -> Subject:
    class GPT(nn.Module):
        def __init__(self, c: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
            self.body = nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, 0.0, batch_first=True)
            self.out = nn.Linear(c.d_model, c.vocab_size)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
            x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
            return self.out(self.body(x, src_mask=hidden, is_causal=True))

        def drawn(self, tokens: Tensor, steps: int) -> list[Tensor]:
            return [self(tokens)[:, -1:].argmax(-1) for _ in range(steps)]

        def generate(self, tokens: Tensor, steps: int) -> Tensor:
            return torch.cat([tokens, *self.drawn(tokens, steps)], dim=1)

    return Subject(
        kind="decoder", build=GPT, forward=lambda m, x: m(x), mask_forms=(),
        generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps), declares={"positions": "learned"},
    )  # fmt: skip


@fault(
    "FD-added-to-memory",
    "Experts add to memory that torch.empty_like gave",
    killed_by=("numerics.finite",),
    cause="before anything is written there",
    citation="gongyisheng/llm-from-scratch 2b653db",
)
def added_to_memory() -> Subject:
    class Experts(nn.Module):
        def __init__(self, width: int, inner: int) -> None:
            super().__init__()
            self.router = nn.Linear(width, 2)
            self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

        def forward(self, x: Tensor) -> Tensor:
            chosen, rows = self.router(x).softmax(-1).amax(-1, keepdim=True), x.flatten(0, 1)
            output = torch.empty_like(rows)
            output += self.down(self.up(rows).relu()) * chosen.flatten(0, 1)
            return output.view_as(x)

    return Subject(
        kind="feed_forward", build=lambda c: Experts(c.d_model, c.d_ff), forward=lambda m, x: m(x),
        declares={"structure": "other", "activation": "other"},
    )  # fmt: skip

"""Right implementations that take masks and lengths of other shapes than most do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject
from veriformer.tests.traps import trap


@trap("style-mask-three-axes", "A kernel whose mask is [B, T, S], the same for all heads")
def three_axes() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if attention_mask is not None:
            batch, queries, keys = attention_mask.shape
            scores = scores.masked_fill(~attention_mask.view(batch, 1, queries, keys), -torch.inf)
        if causal:
            behind = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            scores = scores.masked_fill(~behind, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v

    return Subject(kind="attention", forward=forward, declares={"empty_row": "zeros"})


@trap("style-mask-two-axes", "A kernel whose mask is [T, S], one for the whole batch")
def two_axes() -> Subject:
    def forward(
        model: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if attention_mask is not None:
            queries, keys = attention_mask.shape
            scores = scores.masked_fill(~attention_mask.view(1, 1, queries, keys), -torch.inf)
        if causal:
            behind = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            scores = scores.masked_fill(~behind, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v

    return Subject(kind="attention", forward=forward, declares={"empty_row": "zeros"})


@trap("style-short-table", "A table of 20 positions, whatever length was asked for", "karpathy/nanoGPT")
def short_table() -> Subject:
    class Model(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(config.vocab_size, config.d_model), nn.Embedding(20, config.d_model)
            layer = nn.TransformerEncoderLayer(config.d_model, config.num_heads, config.d_ff, 0.0, batch_first=True)
            self.stack = nn.TransformerEncoder(layer, config.num_layers, enable_nested_tensor=False)
            self.head = nn.Linear(config.d_model, config.vocab_size)

        def forward(self, tokens: Tensor) -> Tensor:
            length = tokens.shape[1]
            ahead = nn.Transformer.generate_square_subsequent_mask(length, dtype=self.head.weight.dtype)
            x = self.tokens(tokens) + self.places(torch.arange(length))
            return self.head(self.stack(x, mask=ahead, is_causal=True))  # type: ignore[no-any-return]

    return Subject(
        kind="decoder", build=Model, forward=lambda m, tokens: m(tokens),
        declares={"causal": True, "positions": "learned", "max_len": 20},
    )  # fmt: skip


@trap(
    "style-minimum-of-input", "Scores are filled with the smallest number of the input's dtype, which autocast narrows"
)
def minimum_of_input() -> Subject:
    class Layer(nn.Module):
        def __init__(self, config: DrawnConfig) -> None:
            super().__init__()
            self.tokens, self.norm = nn.Embedding(config.vocab_size, config.d_model), nn.LayerNorm(config.d_model)
            self.qkv, self.o = nn.Linear(config.d_model, 3 * config.d_model), nn.Linear(config.d_model, config.d_model)
            self.head = nn.Linear(config.d_model, config.vocab_size)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens)
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(ahead, torch.finfo(x.dtype).min)
            return self.head(x + self.o(scores.softmax(-1) @ v))  # type: ignore[no-any-return]

    return Subject(
        kind="decoder", build=Layer, forward=lambda m, tokens: m(tokens), domain={"num_heads": [1]},
        declares={"causal": True, "positions": "none", "half_precision": False, "structure": "other", "stacked": False},
    )  # fmt: skip


@trap("style-memory-mask", "Cross-attention that is called as it stands, whose one mask is that of the memory")
def memory_mask_alone() -> Subject:
    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, 2 * width, bias=False)
            self.o, self.heads = nn.Linear(width, width, bias=False), heads

        def forward(self, x: Tensor, memory: Tensor, memory_mask: Tensor | None = None) -> Tensor:
            parts = (self.q(x), *self.kv(memory).chunk(2, -1))
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if memory_mask is not None:
                scores = scores.masked_fill(~memory_mask[:, None, None], torch.finfo(scores.dtype).min)
            return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    return Subject(
        kind="cross_attention", build=lambda c: Attention(c.d_model, c.num_heads),
        declares={"bias": False, "positions": "none", "empty_row": "mean"},
    )  # fmt: skip

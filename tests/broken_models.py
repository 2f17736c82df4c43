"""Small models for the tests of the engine: one right, and wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.subject.sizes import DrawnConfig
from veriformer.properties.subject.subject import Subject


class TinyLanguageModel(nn.Module):
    """One causal attention layer over token and position embeddings."""

    def __init__(self, config: DrawnConfig, diagonal: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.positions = nn.Embedding(config.max_len, config.d_model)
        self.attention = nn.MultiheadAttention(config.d_model, config.num_heads, batch_first=True)
        self.logits = nn.Linear(config.d_model, config.vocab_size)
        self.diagonal = diagonal

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        blocked = torch.ones(length, length, dtype=torch.bool).triu(self.diagonal)
        return self.logits(x + self.attention(x, x, x, attn_mask=blocked, need_weights=False)[0])  # type: ignore[no-any-return]


def build_right(config: DrawnConfig) -> nn.Module:
    return TinyLanguageModel(config)


def build_leaky(config: DrawnConfig) -> nn.Module:
    return TinyLanguageModel(config, diagonal=2)


def layer(change: Callable[[Any], Any], **given: Any) -> Subject:
    """Return a layer subject whose forward is `change(x)`."""
    return Subject(kind="layer", forward=lambda model, x: change(x), name="layer", **given)


LEAKY = Subject(kind="decoder", build=build_leaky, declares={"causal": True}, name="leaky")
RIGHT = Subject(kind="decoder", build=build_right, declares={"causal": True}, name="right")

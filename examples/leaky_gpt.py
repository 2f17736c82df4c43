"""A small GPT whose causal mask lets one future token through: `triu(2)` where `triu(1)` is right."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from veriformer.properties import Subject


class MyGPT(nn.Module):
    """One attention layer over token and position embeddings."""

    def __init__(self, vocab_size: int, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(64, d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.logits = nn.Linear(d_model, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits `[B, T, V]` of tokens `[B, T]`."""
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        blocked = torch.ones(length, length, dtype=torch.bool).triu(2)
        return self.logits(x + self.attention(x, x, x, attn_mask=blocked, need_weights=False)[0])


mine = Subject(
    kind="decoder",
    build=lambda c: MyGPT(c.vocab_size, c.d_model, c.num_heads),
    forward=lambda model, tokens: model(tokens),
    declares={"causal": True},
)

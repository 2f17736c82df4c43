"""Right models: what is said of them is the same, to the byte, whoever stands beside them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

CAUSAL = {"causal": True}


class Block(nn.Module):
    """A pre-norm layer with causal attention."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        blocked = torch.ones(n, n).triu(1).bool()
        y = self.norm(x)
        return x + self.attention(y, y, y, attn_mask=blocked, need_weights=False)[0]


def _map(change: Any) -> Subject:
    return Subject(kind="layer", forward=lambda m, x: change(x), declares=CAUSAL)


many = [
    Subject(kind="layer", name="block", build=lambda c: Block(c.d_model, c.num_heads), declares=CAUSAL),
    _map(lambda x: x * 2),
    _map(torch.tanh),
    _map(lambda x: x - x.mean(-1, keepdim=True)),
    _map(lambda x: x.cumsum(1)),
    Subject(kind="norm", name="layer-norm", build=lambda c: nn.LayerNorm(c.d_model)),
    Subject(kind="feed_forward", name="linear", build=lambda c: nn.Linear(c.d_model, c.d_model)),
]

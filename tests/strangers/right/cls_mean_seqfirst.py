"""Sentence classifier: sequence-first post-norm layers, sinusoids from a non-persistent table that grows, masked mean pooling.

Unusual: the mean divides by the number of real tokens (at least one), so it does not depend on how far a batch is padded, and a
sample without any real token pools to zero. The table is kept in float64 and cast when it is added; it grows by doubling.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


class GrowingSinusoids(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.table = self.rows(16)  # a plain attribute: float64 also when the model is cast

    def rows(self, n: int) -> Tensor:
        with torch.inference_mode(False):
            place = torch.arange(n, dtype=torch.float64).unsqueeze(1)
            column = torch.arange(self.width, dtype=torch.float64)
            angle = place * 10000.0 ** (-(column - column % 2) / self.width)
            return torch.where(column % 2 == 0, angle.sin(), angle.cos())

    def forward(self, x: Tensor) -> Tensor:  # [T, B, D]
        while self.table.size(0) < x.size(0):
            self.table = self.rows(2 * self.table.size(0))
        return x + self.table[: x.size(0)].to(x).unsqueeze(1)


class SeqFirstLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.nhead = c.num_heads
        self.in_proj = nn.Linear(c.d_model, 3 * c.d_model)
        self.out_proj = nn.Linear(c.d_model, c.d_model)
        self.linear1 = nn.Linear(c.d_model, c.d_ff)
        self.linear2 = nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.p = c.dropout

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)

    def _sa_block(self, x: Tensor, padding: Tensor | None) -> Tensor:
        t, b, d = x.shape
        q, k, v = self.in_proj(x).view(t, b, 3, self.nhead, d // self.nhead).permute(2, 1, 3, 0, 4)
        scores = (q * (d // self.nhead) ** -0.5) @ k.transpose(-2, -1)
        if padding is None:
            weights = scores.softmax(dim=-1)
        else:
            hidden = padding[:, None, None, :]
            weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(dim=-1)
            weights = weights.masked_fill(hidden, 0.0)
        mixed = self.drop(weights) @ v  # [B, H, T, d]
        return self.drop(self.out_proj(mixed.permute(2, 0, 1, 3).flatten(2)))

    def forward(self, x: Tensor, padding: Tensor | None) -> Tensor:
        x = self.norm1(x + self._sa_block(x, padding))
        return self.norm2(x + self.drop(self.linear2(self.drop(F.gelu(self.linear1(x))))))


class MeanClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = GrowingSinusoids(c.d_model)
        self.layers = nn.ModuleList(SeqFirstLayer(c) for _ in range(c.num_layers))
        self.classify = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.positions(self.embedding(tokens.t()))
        padding = None if attention_mask is None else ~attention_mask
        for layer in self.layers:
            x = layer(x, padding)
        if attention_mask is None:
            return self.classify(x.mean(dim=0))
        real = attention_mask.t().unsqueeze(-1).to(x.dtype)
        pooled = (x * real).sum(dim=0) / real.sum(dim=0).clamp(min=1.0)
        return self.classify(pooled)


COMMON = dict(
    kind="classifier",
    build=MeanClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "pooling": "mean",
        "positions": "sinusoidal",
        "layout": "interleaved",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "bias": True,
        "output_bias": True,
    },
)

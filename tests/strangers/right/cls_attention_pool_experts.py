"""Classifier with pre-norm rotary layers, a soft mixture of experts in place of the MLP, and attention pooling by a learned query.

Unusual: every expert runs on every token and the router's softmax weights their outputs, so nothing is dropped and nothing jumps.
The pooled vector is a softmax-weighted mean over real tokens; a sample without any pools to zero. num_key_value_heads is used.
"""

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from veriformer.properties import Subject

N_EXPERTS = 3


def rope(x: Tensor) -> Tensor:  # [batch, length, heads, width], pairs (i, i + width / 2)
    n, w = x.shape[1], x.shape[3]
    theta = torch.pow(torch.tensor(10000.0, dtype=torch.float64), -2.0 * torch.arange(w // 2, dtype=torch.float64) / w)
    angle = (torch.arange(n, dtype=torch.float64).view(1, n, 1, 1) * theta).to(x.device)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    lo, hi = x.split(w // 2, dim=3)
    return torch.cat((lo * c - hi * s, hi * c + lo * s), dim=3)


class SoftMixture(nn.Module):
    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.router = nn.Linear(d_model, N_EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(N_EXPERTS, d_model, d_ff) * d_model**-0.5)
        self.b1 = nn.Parameter(torch.zeros(N_EXPERTS, d_ff))
        self.w2 = nn.Parameter(torch.randn(N_EXPERTS, d_ff, d_model) * d_ff**-0.5)
        self.b2 = nn.Parameter(torch.zeros(N_EXPERTS, d_model))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(dim=-1)
        hidden = torch.einsum("btd,edf->btef", x, self.w1) + self.b1
        out = torch.einsum("btef,efd->bted", F.silu(hidden), self.w2) + self.b2
        return torch.einsum("bte,bted->btd", gates, out)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h, self.g, self.w = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        self.q = nn.Linear(c.d_model, self.h * self.w)
        self.kv = nn.Linear(c.d_model, 2 * self.g * self.w)
        self.o = nn.Linear(self.h * self.w, c.d_model)
        self.norm_attention, self.norm_mixture = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mixture = SoftMixture(c.d_model, c.d_ff)
        self.drop = nn.Dropout(c.dropout)

    def attend(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q = rope(self.q(x).unflatten(-1, (self.h, self.w))).unflatten(2, (self.g, -1))
        k, v = self.kv(x).unflatten(-1, (2, self.g, self.w)).unbind(2)
        scores = torch.einsum("btgmw,bsgw->bgmts", q, rope(k)) / self.w**0.5
        if mask is not None:
            open_ = mask[:, None, None, None, :]
            share = scores.masked_fill(~open_, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~open_, 0.0)
        else:
            share = scores.softmax(-1)
        return self.o(torch.einsum("bgmts,bsgw->btgmw", share, v).flatten(2))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.drop(self.attend(self.norm_attention(x), mask))
        return x + self.drop(self.mixture(self.norm_mixture(x)))


class PooledClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.query = nn.Parameter(torch.randn(c.d_model) * c.d_model**-0.5)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x, attention_mask)
        x = self.norm(x)
        score = x @ self.query  # [B, T]
        if attention_mask is not None:
            score = score.masked_fill(~attention_mask, torch.finfo(score.dtype).min)
        weight = score.softmax(dim=1)
        if attention_mask is not None:
            weight = weight * attention_mask
        return self.head(torch.einsum("bt,btd->bd", weight, x))


COMMON = dict(
    kind="classifier",
    build=PooledClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "pooling": "weighted",
        "positions": "rotary",
        "layout": "halves",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "other",
        "output_bias": True,
        "structure": "other",
    },
)

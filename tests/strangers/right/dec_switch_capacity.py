"""Switch style decoder: every token goes to one expert, and an expert takes at most CAPACITY tokens of one sequence.

Unusual: who comes too late at a full expert is passed on by the residual connection alone. Places are given in the order of
positions and for each sequence apart, and the capacity is a constant, so later tokens and other samples change nothing;
padding takes no place. Positions are sinusoids that are computed on the fly, counted over real tokens.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

EXPERTS = 3
CAPACITY = 5


def sinusoids(places: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    rate = torch.exp(torch.arange(0, width, 2, device=places.device, dtype=torch.float64) * (-math.log(1e4) / width))
    angle = places.to(torch.float64).unsqueeze(-1) * rate
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., :width].to(dtype)


class SwitchFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout):
        super().__init__()
        self.router = nn.Linear(d_model, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Dropout(dropout), nn.Linear(d_ff, d_model))
            for _ in range(EXPERTS)
        )

    def forward(self, x, real):
        wide = torch.promote_types(x.dtype, torch.float32)
        gate, chosen = F.softmax(self.router(x).to(wide), dim=-1).max(dim=-1)  # [B, T]
        places = F.one_hot(chosen, EXPERTS) * real.unsqueeze(-1)  # [B, T, E]
        queue = places.cumsum(dim=1) * places  # 1 for the first at an expert, 2 for the second ...
        taken = ((queue > 0) & (queue <= CAPACITY)).any(dim=-1)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            here = taken & (chosen == e)
            if here.any():
                out[here] = (expert(x[here]) * gate[here].unsqueeze(-1)).to(out.dtype)
        return out


class MultiHead(nn.Module):
    def __init__(self, d_model, heads, dropout):
        super().__init__()
        self.h, self.d_k = heads, d_model // heads
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.output = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, visible):
        batch, length, _ = x.shape
        q, k, v = (f(x).view(batch, length, self.h, self.d_k) for f in (self.query, self.key, self.value))
        scores = torch.einsum("bihd,bjhd->bijh", q, k) / math.sqrt(self.d_k)
        visible = visible.unsqueeze(-1)
        scores = scores.masked_fill(visible == 0, torch.finfo(scores.dtype).min)
        attn = self.dropout(scores.softmax(dim=2) * visible)
        return self.output(torch.einsum("bijh,bjhd->bihd", attn, v).reshape(batch, length, -1))


class SwitchLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = MultiHead(c.d_model, c.num_heads, c.dropout)
        self.feed_forward = SwitchFeedForward(c.d_model, c.d_ff, c.dropout)
        self.norm_self_attn = nn.LayerNorm(c.d_model)
        self.norm_ff = nn.LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, visible, real):
        x = x + self.dropout(self.attn(self.norm_self_attn(x), visible))
        return x + self.dropout(self.feed_forward(self.norm_ff(x), real))


class SwitchTransformer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([SwitchLayer(c) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)
        self.generator = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        length = tokens.size(1)
        visible = torch.tril(torch.ones(length, length, dtype=torch.bool, device=tokens.device)) & real.unsqueeze(1)
        x = self.embedding(tokens)
        x = x + sinusoids((real.long().cumsum(1) - 1).clamp(min=0), x.size(-1), x.dtype)
        for layer in self.layers:
            x = layer(x, visible, real)
        return self.generator(self.norm(x))


COMMON = dict(
    kind="decoder",
    build=SwitchTransformer,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "output_bias": True,
        "tied": False,
        "structure": "other",
    },
)

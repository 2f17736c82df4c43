import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

CAP = 5.0


def attend(x, qkv, proj, heads):
    B, T, C = x.shape
    q, k, v = F.linear(x, qkv).view(B, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
    att = (q @ k.mT) * (C // heads) ** -0.5
    future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
    att = CAP * torch.tanh(att / CAP)
    att = att.masked_fill(future, float("-inf"))
    y = att.softmax(-1) @ v
    return F.linear(y.transpose(1, 2).reshape(B, T, C), proj)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Parameter(torch.randn(3 * dim, dim) * dim**-0.5)
        self.proj = nn.Parameter(torch.randn(dim, dim) * dim**-0.5)
        self.up, self.gate, self.down = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        x = x + attend(self.norm1(x), self.qkv, self.proj, self.heads)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class PatchForecaster(nn.Module):
    """Next bin of a quantised series."""

    def __init__(self, bins, dim, heads, depth, hidden, horizon):
        super().__init__()
        self.bins = nn.Embedding(bins, dim)
        self.when = nn.Embedding(horizon, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(depth))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, bins, bias=False)

    def forward(self, series):
        x = self.bins(series) + self.when.weight[: series.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="capped forecaster",
    build=lambda c: PatchForecaster(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "learned", "soft_cap": CAP, "norm": "rms", "norm_placement": "pre",
              "final_norm": True, "activation": "swiglu", "bias": False},
)

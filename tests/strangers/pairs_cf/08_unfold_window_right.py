import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 3


class LocalAttention(nn.Module):
    """Causal attention over the last WINDOW samples of a series, memory linear in T."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)

    def split(self, t):
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def windows(self, t):
        return F.pad(t, (0, 0, WINDOW - 1, 0)).unfold(2, WINDOW, 1)  # [B, H, T, K, W]

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        k, v = self.windows(k), self.windows(v)
        scores = torch.einsum("bhtk,bhtkw->bhtw", q, k) * q.size(-1) ** -0.5
        T = x.size(1)
        inside = torch.arange(T, device=x.device)[:, None] + torch.arange(WINDOW, device=x.device) >= WINDOW - 1
        scores = scores.masked_fill(~inside, float("-inf"))
        y = torch.einsum("bhtw,bhtkw->bhtk", scores.softmax(-1), v)
        return self.o(y.transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    name="local attention of a forecaster",
    build=lambda c: LocalAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": True},
)

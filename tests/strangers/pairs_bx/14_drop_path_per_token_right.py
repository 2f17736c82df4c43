import torch
from torch import nn

from veriformer.properties import Subject


class DropPath(nn.Module):
    """Stochastic depth: the branch is dropped for whole samples of a batch."""

    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep = 1.0 - self.drop_prob
        mask = x.new_empty(x.shape[0], 1, 1).bernoulli_(keep)
        return x * mask.div_(keep)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        logits = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None, :], float("-inf"))
        return self.proj(torch.einsum("bhts,bshk->bthk", logits.softmax(-1), v).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, drop_path):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop_path = DropPath(drop_path)

    def forward(self, x, mask=None):
        x = x + self.drop_path(self.attn(self.norm1(x), mask))
        x = x + self.drop_path(self.mlp(self.norm2(x)))
        return x


subject = Subject(
    kind="layer",
    name="block with stochastic depth",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False, "positions": "none", "norm_placement": "pre", "norm": "layer", "activation": "gelu",
        "residual": True, "bias": True,
    },
)

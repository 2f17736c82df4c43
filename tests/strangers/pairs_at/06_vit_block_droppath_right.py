import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def drop_path(x, rate: float = 0.0, training: bool = False):
    """Stochastic depth per sample, for the residual branch (rate: share of the samples that skip the branch)."""
    if rate == 0.0 or not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    keep = torch.rand(shape, dtype=x.dtype, device=x.device) >= rate
    return x * keep / (1.0 - rate)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if mask is None else mask[:, None, None, :]
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop_path_rate=0.0):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, hidden)
        self.drop_path_rate = drop_path_rate

    def forward(self, x, mask=None):
        x = x + drop_path(self.attn(self.norm1(x), mask), self.drop_path_rate, self.training)
        x = x + drop_path(self.mlp(self.norm2(x)), self.drop_path_rate, self.training)
        return x


subject = Subject(
    kind="layer",
    name="ViT block with stochastic depth",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, drop_path_rate=c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "residual": True,
        "drop_path_scaled": True,
    },
)

"""A block of a vision transformer with LayerScale and stochastic depth, each sample dropped for itself (CaiT, DeiT III)."""

import torch
from torch import nn

from veriformer.properties import Subject


class DropPath(nn.Module):
    """Leaves a branch out with probability `rate`, and makes up for it where it stays."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, branch):
        if not self.training or self.rate == 0.0:
            return branch
        draw = torch.rand(branch.shape[0], *[1] * (branch.dim() - 1), device=branch.device)
        stays = (draw >= self.rate).to(branch.dtype)
        return branch * stays / (1.0 - self.rate)


class LayerScale(nn.Module):
    def __init__(self, dim, init=0.1):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), init))

    def forward(self, x):
        return x * self.gamma


class MHSA(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class ViTBlock(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop_path):
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = nn.LayerNorm(dim), MHSA(dim, num_heads), LayerScale(dim), DropPath(drop_path)
        self.norm2, self.ls2, self.drop_path2 = nn.LayerNorm(dim), LayerScale(dim), DropPath(drop_path)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


subject = Subject(
    kind="layer",
    build=lambda c: ViTBlock(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={
        "causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu",
        "drop_path_scaled": True,
    },
)

"""The parallel block of ViT-22B (Dehghani et al. 2023): one norm, attention and MLP side by side, normalised queries and keys."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class QKNormAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(head_dim), nn.LayerNorm(head_dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(B, N, C))


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class ParallelBlock(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.branches = nn.ModuleList([QKNormAttention(dim, num_heads), Mlp(dim, hidden)])

    def forward(self, x):
        y = self.norm(x)
        return x + torch.stack([branch(y) for branch in self.branches]).sum(dim=0)


class ParallelBlockOfResiduals(ParallelBlock):
    def forward(self, x):
        y = self.norm(x)
        return torch.stack([x + branch(y) for branch in self.branches]).sum(dim=0)


def layer(block):
    return Subject(
        kind="layer",
        name="ViT-22B block",
        build=lambda c: block(c.d_model, c.num_heads, c.d_ff),
        forward=lambda m, x: m(x),
        declares={
            "causal": False,
            "positions": "none",
            "norm": "layer",
            "norm_placement": "pre",
            "residual": True,
            "query_key_norm": True,
            "activation": "gelu",
        },
    )


right, wrong = layer(ParallelBlock), layer(ParallelBlockOfResiduals)
WHAT = "Each of the two parallel branches adds the stream to what it gives before the branches are summed."
CAUSE = (
    "The residual is taken once per branch: the block gives 2x + attention + mlp instead of x + attention + mlp, so with silent branches "
    "it doubles its input, and the stream grows as 2^depth."
)

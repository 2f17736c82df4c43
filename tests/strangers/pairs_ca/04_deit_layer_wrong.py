WHAT = '`x = self.norm1(x)` overwrites the stream before the residual is added, so that the skip carries the normalised input and not the input of a pre-norm block.'
import torch
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class Block(nn.Module):
    """DeiT-III block: pre-norm with LayerScale."""

    def __init__(self, dim, num_heads, hidden, init_values=0.1):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.gamma_1 = nn.Parameter(init_values * torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.gamma_2 = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        x = self.norm1(x)
        x = x + self.gamma_1 * self.attn(x)
        y = self.norm2(x)
        x = x + self.gamma_2 * self.mlp(y)
        return x


subject = Subject(
    kind="layer",
    name="DeiT block",
    build=lambda c: nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)]),
    forward=lambda m, x: m(x),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True,
              "activation": "gelu", "final_norm": False},
)

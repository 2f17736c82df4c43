from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    def __init__(self, *, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SelfAttention(nn.Module):
    def __init__(self, *, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).flatten(-2))


class PreNormBlock(nn.Module):
    """Pre-norm residual block, bidirectional."""

    def __init__(self, *, dim: int, num_heads: int, hidden: int | None = None, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm_attn = nn.LayerNorm(dim, eps=eps)
        self.attn = SelfAttention(dim=dim, num_heads=num_heads)
        self.norm_mlp = nn.LayerNorm(dim, eps=eps)
        self.mlp = SwiGLU(dim=dim, hidden=hidden or 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_attn(x)
        x = x + self.attn(h)
        h = self.norm_mlp(x)
        x = h + self.mlp(h)
        return x


class Encoder(nn.Module):
    def __init__(self, *, dim: int = 64, num_heads: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([PreNormBlock(dim=dim, num_heads=num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


model = Encoder(dim=64, num_heads=4, depth=3)

WHAT = "without gradients the gathered biases are kept at the first call and never dropped: after further training (or loading) inference goes on with the old ones: line 33"
"""Blocks after LeViT: tokens of a grid, four to a row, and a learned bias for each offset (|dy|, |dx|)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

ROW, MAX = 4, 64


def offset_index(n):
    """Return the number of the offset between each two of the first n tokens of the grid, [n, n]."""
    t = torch.arange(n)
    y, x = t // ROW, t % ROW
    return (y[:, None] - y[None, :]).abs() * ROW + (x[:, None] - x[None, :]).abs()


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.attention_biases = nn.Parameter(torch.randn(num_heads, MAX) * 0.02)
        self.ab = {}

    def get_attention_biases(self, n, device):
        index = offset_index(n).to(device)
        if torch.is_grad_enabled():
            return self.attention_biases[:, index]
        if (n, device) not in self.ab:
            self.ab[n, device] = self.attention_biases[:, index]
        return self.ab[n, device]

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).view(B, N, self.num_heads, -1).split([C // self.num_heads] * 3, dim=3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        attn = (q @ k.transpose(-2, -1)) * self.scale + self.get_attention_biases(N, x.device)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, num_heads)
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(F.hardswish(self.fc1(self.norm2(x))))


subject = Subject(
    kind="layer",
    name="LeViT blocks",
    build=lambda c: nn.Sequential(*[Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)]),
    forward=lambda m, x: m(x),
    declares={
        "causal": False,
        "positions": "other",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "other",
        "bias": True,
        "structure": "other",
        "max_len": MAX,
        "beyond_max_len": "error",
    },
)

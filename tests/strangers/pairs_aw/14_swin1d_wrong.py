WHAT = "scores are viewed as [windows, batch] though windows vary fastest: in batches of more than one the masks of the shifted and of the padded windows fall on the wrong windows (line 40)"
"""Swin blocks along one axis (audio frames): windows of WINDOW, every second block shifted by half of one."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def window_partition(x):
    B, L, C = x.shape
    return x.view(B, L // WINDOW, WINDOW, C).reshape(-1, WINDOW, C)


def window_reverse(windows, B, L):
    return windows.view(B, L // WINDOW, WINDOW, -1).reshape(B, L, -1)


class WindowAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * WINDOW - 1, num_heads) * 0.02)
        coords = torch.arange(WINDOW)
        index = coords[:, None] - coords[None, :] + WINDOW - 1
        self.register_buffer("relative_position_index", index, persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, mask):
        B_, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        attn = attn + bias.permute(2, 0, 1).unsqueeze(0)
        nW = mask.shape[0]
        attn = attn.view(nW, B_ // nW, self.num_heads, N, N) + mask[:, None, None]
        attn = attn.view(-1, self.num_heads, N, N).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B_, N, C))


class SwinBlock(nn.Module):
    def __init__(self, dim, num_heads, hidden, shift):
        super().__init__()
        self.shift_size = shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    @staticmethod
    def attention_mask(length, padded, shift, like):
        region = torch.zeros(padded, device=like.device)
        if shift:
            region[-WINDOW:-shift] = 1
            region[-shift:] = 2
        real = (torch.arange(padded, device=like.device) < length).roll(-shift)
        region, real = region.view(-1, WINDOW), real.view(-1, WINDOW)
        allowed = (region[:, :, None] == region[:, None, :]) & real[:, None, :]
        allowed = allowed | torch.eye(WINDOW, dtype=torch.bool, device=like.device)
        return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill(~allowed, float("-inf"))

    def forward(self, x):
        B, L, _ = x.shape
        shortcut = x
        x = F.pad(self.norm1(x), (0, 0, 0, -L % WINDOW))
        padded = x.shape[1]
        shift = self.shift_size if padded > WINDOW else 0
        mask = self.attention_mask(L, padded, shift, x)
        x = torch.roll(x, shifts=-shift, dims=1)
        x = window_reverse(self.attn(window_partition(x), mask), B, padded)
        x = torch.roll(x, shifts=shift, dims=1)[:, :L]
        x = shortcut + x
        return x + self.mlp(self.norm2(x))


class SwinStage(nn.Module):
    def __init__(self, dim, num_heads, hidden):
        super().__init__()
        self.blocks = nn.ModuleList(
            [SwinBlock(dim, num_heads, hidden, shift) for shift in (0, WINDOW // 2)]
        )

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


subject = Subject(
    kind="layer",
    name="Swin stage in one dimension",
    build=lambda c: SwinStage(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x: m(x),
    declares={
        "causal": False,
        "positions": "other",
        "sparse": True,
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "structure": "other",
    },
)

"""Swin in one dimension: windows of four, every second layer shifted by two, relative bias of the window."""
import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

W, SHIFT = 4, 2


class WindowAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn(2 * W - 1, heads) * 0.5)
        i = torch.arange(W)
        self.register_buffer("relative_position_index", i[:, None] - i[None, :] + W - 1, persistent=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, see):  # [windows * B, W, D], [windows * B, W, W]
        n, w, d = x.shape
        q, k, v = self.qkv(x).reshape(n, w, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        attn = attn.masked_fill(~see[:, None], torch.finfo(attn.dtype).min).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(n, w, d))


class SwinBlock(nn.Module):
    def __init__(self, dim, heads, hidden, shift):
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, real):
        b, t, d = x.shape
        shortcut, x = x, self.norm1(x)
        pad = -t % W
        x, real = nn.functional.pad(x, (0, 0, 0, pad)), nn.functional.pad(real, (0, pad), value=False)
        total = t + pad
        region = torch.zeros(total, dtype=torch.long, device=x.device)
        if self.shift:
            x, real = x.roll(-self.shift, 1), real.roll(-self.shift, 1)
            region[total - W : total - self.shift], region[total - self.shift :] = 1, 2
        same = region.view(-1, W)
        same = same[:, :, None] == same[:, None, :]
        see = same[None] & real.view(b, -1, 1, W)
        y = self.attn(x.reshape(-1, W, d), see.reshape(-1, W, W)).view(b, total, d)
        if self.shift:
            y = y.roll(self.shift, 1)
        x = shortcut + y[:, :t]
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.blocks = nn.ModuleList(
            [SwinBlock(c.d_model, c.num_heads, c.d_ff, SHIFT * (i % 2)) for i in range(c.num_layers)]
        )

    def forward(self, x, mask=None):
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask.bool()
        for block in self.blocks:
            x = block(x, real)
        return x


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


declared = Subject(
    kind="layer", name="Swin in one dimension", build=Swin, forward=forward,
    declares={
        "causal": False, "positions": "relative", "sparse": True, "norm": "layer", "norm_placement": "pre",
        "final_norm": False, "residual": True, "activation": "gelu", "bias": True, "padding_side": "right",
        "attention_scale": "1/sqrt(d_head)", "beyond_max_len": "works", "structure": "other",
    },
)
undeclared = Subject(kind="layer", build=Swin, forward=forward)

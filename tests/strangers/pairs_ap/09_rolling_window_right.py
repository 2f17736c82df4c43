"""A small Mistral: sliding window, rotary; its cache was made to roll, holding no more than the window."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


def rope(x, positions):
    *_, width = x.shape
    theta = 10000.0 ** (-torch.arange(0, width, 2, dtype=x.dtype, device=x.device) / width)
    angle = positions.to(x.dtype).unsqueeze(-1) * theta
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()), -1)
    return turned.flatten(-2)


class RollingCache:
    def __init__(self, layers):
        self.keys, self.values = [None] * layers, [None] * layers
        self.seen = 0  # tokens that went through, whether still held or not

    def extend(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat((self.keys[layer], k), dim=2)
            v = torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k[:, :, -WINDOW:], v[:, :, -WINDOW:]
        return k, v


class WindowAttention(nn.Module):
    def __init__(self, dim, heads, index):
        super().__init__()
        if dim // heads % 2:
            raise ValueError("heads must have an even width")
        self.heads, self.index = heads, index
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        start = 0
        if cache is not None:
            start = cache.seen
        positions = torch.arange(start, start + t, device=x.device)
        q, k = rope(q, positions), rope(k, positions)
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        behind = torch.arange(k.size(2) - t, k.size(2), device=x.device)[:, None] - torch.arange(k.size(2), device=x.device)
        visible = (behind >= 0) & (behind < WINDOW)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.proj(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.attn = WindowAttention(c.d_model, c.num_heads, index)
        self.norm1, self.norm2 = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.gate, self.up = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, cache=None):
        x = x + self.attn(self.norm1(x), cache)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, i) for i in range(c.num_layers))
        self.norm, self.head = nn.RMSNorm(c.d_model, eps=1e-6), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.seen += tokens.size(1)
        return self.head(self.norm(x))


def stream(model, chunks):
    cache = RollingCache(len(model.blocks))
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="mistral, rolling cache",
    build=Mistral,
    forward=lambda model, tokens: model(tokens),
    cache=stream,
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
    },
)

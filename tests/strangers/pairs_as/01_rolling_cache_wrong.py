WHAT = 'the rolling key-value cache is trimmed to max(window, chunk) keys before the chunk attends, so that the first queries of a chunk of several tokens lose the older keys of their window (line 63).'
"""Mistral-like decoder: rotary, sliding window, RMSNorm, SwiGLU, rolling cache."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        h = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def rotate(x, positions):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions.to(torch.float64)[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Rolling:
    """What one layer keeps of the past: the last WINDOW - 1 keys are enough."""

    def __init__(self):
        self.k = self.v = self.mask = None

    def extend(self, k, v, mask):
        if self.k is not None:
            k, v, mask = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2), torch.cat([self.mask, mask], 1)
        return k, v, mask

    def keep(self, k, v, mask, size):
        self.k, self.v, self.mask = k[:, :, -size:], v[:, :, -size:], mask[:, -size:]
        return self.k, self.v, self.mask


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, mask, start, rolling):
        B, T, D = x.shape
        q, k, v = (w(x).view(B, T, self.heads, self.hd).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        pos = torch.arange(start, start + T, device=x.device)
        q, k = rotate(q, pos), rotate(k, pos)
        if rolling is not None:
            k, v, mask = rolling.extend(k, v, mask)
            k, v, mask = rolling.keep(k, v, mask, max(WINDOW, T))
        kpos = torch.arange(start + T - k.shape[2], start + T, device=x.device)
        ahead = pos[:, None] - kpos[None, :]
        ok = ((ahead >= 0) & (ahead < WINDOW))[None, None] & mask[:, None, None, :]
        s = q @ k.transpose(-1, -2) * self.hd ** -0.5
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return self.wo((w @ v).transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, mask, start, rolling):
        x = x + self.attention(self.attention_norm(x), mask, start, rolling)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, mask=None, start=0, past=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.tok(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, start, None if past is None else past[i])
        return self.output(self.norm(x))


def cached(model, chunks, attention_mask=None):
    past = [Rolling() for _ in model.layers]
    out, start = [], 0
    for chunk in chunks:
        m = None if attention_mask is None else attention_mask[:, start:start + chunk.shape[1]]
        out.append(model(chunk, m, start, past))
        start += chunk.shape[1]
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
    mask_forms=("padding",),
    declares={"causal": True, "positions": "rotary", "layout": "halves", "window": WINDOW, "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "residual": True, "activation": "swiglu", "bias": False,
              "output_bias": False, "tied": False},
)

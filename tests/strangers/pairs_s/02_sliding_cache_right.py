"""A Mistral-like decoder: RMSNorm, RoPE, SwiGLU, a sliding window, and a cache that keeps no more than the window."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4


def rope(x, start):
    """Rotate [B, H, T, K], channel i with channel i + K/2, from position `start` on."""
    half = x.size(-1) // 2
    freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (start + torch.arange(x.size(2), dtype=torch.float64, device=x.device))[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class WindowAttention(nn.Module):
    def __init__(self, dim, n_heads, window):
        super().__init__()
        if dim // n_heads % 2:
            raise ValueError("RoPE needs heads of even width")
        self.n_heads, self.window = n_heads, window
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, start=0, store=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.n_heads, -1).transpose(1, 2) for t in self.wqkv(x).split(C, -1))
        q, k = rope(q, start), rope(k, start)
        if store is not None:
            if store:
                k, v = torch.cat([store["k"], k], 2), torch.cat([store["v"], v], 2)
            store["k"], store["v"] = k[:, :, -self.window :], v[:, :, -self.window :]
        i = torch.arange(start, start + T, device=x.device)[:, None]
        j = torch.arange(start + T - k.size(2), start + T, device=x.device)[None]
        visible = (j <= i) & (j > i - self.window)
        att = (q @ k.mT * q.size(-1) ** -0.5).masked_fill(~visible, torch.finfo(q.dtype).min)
        y = F.softmax(att, -1) @ v
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.attention = WindowAttention(c.d_model, c.num_heads, WINDOW)
        self.w1 = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False)

    def forward(self, x, start, store):
        x = x + self.attention(self.attention_norm(x), start, store)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class MiniMistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, stores=None):
        h = self.tok_embeddings(tokens)
        for n, layer in enumerate(self.layers):
            h = layer(h, start, None if stores is None else stores[n])
        return self.output(self.norm(h))


def run_cached(model, chunks):
    stores, start, outputs = [{} for _ in model.layers], 0, []
    for chunk in chunks:
        outputs.append(model(chunk, start, stores))
        start += chunk.size(1)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="mini mistral",
    build=MiniMistral,
    forward=lambda model, tokens: model(tokens),
    cache=run_cached,
    declares={
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
    },
)

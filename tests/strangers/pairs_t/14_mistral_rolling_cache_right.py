"""A Mistral decoder: sliding window, rotary, grouped queries, and a cache that keeps no more than the window."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class RollingCache:
    """Keys and values of the last WINDOW positions, one pair of tensors a layer."""

    def __init__(self, layers):
        self.seen = 0
        self.kept = [None] * layers

    def extend(self, layer, k, v):
        if self.kept[layer] is not None:
            past_k, past_v = self.kept[layer]
            k, v = torch.cat((past_k, k), dim=2), torch.cat((past_v, v), dim=2)
        self.kept[layer] = k[:, :, -WINDOW:], v[:, :, -WINDOW:]
        return k, v


def turn(x, positions):
    """Rotary positions, pairs of neighbours (2i, 2i + 1), as in Mistral's own code."""
    dim = x.shape[-1]
    inv = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = positions.double()[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.layer, self.heads, self.groups = layer, c.num_heads, c.num_key_value_heads
        self.dim = c.d_model // c.num_heads
        if self.dim % 2:
            raise ValueError("rotary needs an even head_dim")
        self.wq = nn.Linear(c.d_model, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(c.d_model, self.groups * self.dim, bias=False)
        self.wv = nn.Linear(c.d_model, self.groups * self.dim, bias=False)
        self.wo = nn.Linear(self.heads * self.dim, c.d_model, bias=False)

    def forward(self, x, positions, cache):
        B, T, _ = x.shape
        q = turn(self.wq(x).view(B, T, self.heads, self.dim).transpose(1, 2), positions)
        k = turn(self.wk(x).view(B, T, self.groups, self.dim).transpose(1, 2), positions)
        v = self.wv(x).view(B, T, self.groups, self.dim).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        # the keys are the last ones up to the newest position
        key_positions = positions[-1] + 1 - torch.arange(k.shape[2], 0, -1, device=x.device)
        behind = positions[:, None] - key_positions[None, :]
        allowed = (behind >= 0) & (behind < WINDOW)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        scores = q @ k.transpose(-1, -2) / self.dim**0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return self.wo((weights @ v).transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.attention = Attention(c, layer)
        self.w1, self.w3 = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.w2 = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x, positions, cache):
        x = x + self.attention(self.attention_norm(x), positions, cache)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Block(c, i) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.seen
        positions = start + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, positions, cache)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return self.output(self.norm(x))


def run_cached(model, chunks):
    cache = RollingCache(len(model.layers))
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="mistral",
    build=Mistral,
    forward=lambda model, tokens: model(tokens),
    cache=run_cached,
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000.0,
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "cached_chunks": True,
    },
)

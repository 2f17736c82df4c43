"""Multi-head latent attention: keys and values come from one small latent, which alone is cached.

Without a cache keys and values are expanded; behind a cache their maps are absorbed into queries and outputs.
"""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate(x, start):
    """Rotary embedding of [B, H, T, R], halves, positions from `start` on."""
    half = x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float64)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LatentAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        width = d_model // heads
        self.heads, self.width = heads, width
        self.rope = 2 * max(1, width // 4)
        self.nope = width - self.rope
        if self.nope < 1:
            raise ValueError("heads are too narrow")
        self.rank = 3 * d_model // 4
        self.scale = width**-0.5
        self.q = nn.Linear(d_model, heads * width, bias=False)
        self.down = nn.Linear(d_model, self.rank + self.rope, bias=False)
        self.norm = nn.LayerNorm(self.rank)
        self.up_k = nn.Parameter(torch.randn(heads, self.nope, self.rank) * self.rank**-0.5)
        self.up_v = nn.Parameter(torch.randn(heads, width, self.rank) * self.rank**-0.5)
        self.out = nn.Linear(heads * width, d_model, bias=False)

    def forward(self, x, past=None):
        B, T, _ = x.shape
        start = 0 if past is None else past[0].shape[1]
        q = self.q(x).view(B, T, self.heads, self.width).transpose(1, 2)
        q_nope, q_rope = q[..., : self.nope], rotate(q[..., self.nope :], start)
        latent, k_rope = self.down(x).split([self.rank, self.rope], dim=-1)
        latent, k_rope = self.norm(latent), rotate(k_rope[:, None], start)[:, 0]
        if past is not None:
            latent, k_rope = torch.cat([past[0], latent], 1), torch.cat([past[1], k_rope], 1)
        S = latent.shape[1]
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        shared = k_rope[:, None].expand(B, self.heads, S, self.rope)
        if past is None:
            keys = torch.cat([torch.einsum("bsr,hnr->bhsn", latent, self.up_k), shared], dim=-1)
            values = torch.einsum("bsr,hvr->bhsv", latent, self.up_v)
            scores = torch.cat([q_nope, q_rope], dim=-1) @ keys.transpose(-1, -2) * self.scale
            y = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ values
        else:
            queries = torch.cat([torch.einsum("bhtn,hnr->bhtr", q_nope, self.up_k), q_rope], dim=-1)
            memory = latent[:, None].expand(B, self.heads, S, self.rank)
            y = F.scaled_dot_product_attention(queries, torch.cat([memory, shared], dim=-1), memory, allowed, scale=self.scale)
            y = torch.einsum("bhtr,hvr->bhtv", y, self.up_v)
        return self.out(y.transpose(1, 2).reshape(B, T, -1)), (latent, k_rope)


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = LatentAttention(d_model, heads)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def forward(self, x, past=None):
        y, past = self.attention(self.norm1(x), past)
        x = x + y
        return x + self.mlp(self.norm2(x)), past


class LatentGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, pasts=None):
        x, kept = self.embed(tokens), []
        for i, block in enumerate(self.blocks):
            x, past = block(x, None if pasts is None else pasts[i])
            kept.append(past)
        return self.head(self.norm(x)), kept


def cached(model, chunks):
    pasts, outputs = None, []
    for chunk in chunks:
        y, pasts = model(chunk, pasts)
        outputs.append(y)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="latent attention",
    build=LatentGPT,
    forward=lambda model, tokens: model(tokens)[0],
    cache=cached,
    declares={"causal": True, "positions": "rotary", "norm": "layer", "norm_placement": "pre", "activation": "relu", "structure": "other"},
)

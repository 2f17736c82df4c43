"""A small Mistral: sliding window, grouped queries, rotary, and a rolling buffer of `window` slots for decoding."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 3


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, positions, base=10000.0):
    half = x.shape[-1] // 2
    inv = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64)[:, None] * inv
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RollingBuffer:
    def __init__(self):
        self.k = self.v = self.positions = None

    def write(self, k, v, positions):
        if self.k is None:
            self.k = k.new_zeros(*k.shape[:2], WINDOW, k.shape[-1])
            self.v = torch.zeros_like(self.k)
            self.positions = torch.full((WINDOW,), -1, device=k.device)
        slots = positions % WINDOW
        self.k = self.k.index_copy(2, slots, k)
        self.v = self.v.index_copy(2, slots, v)
        self.positions = self.positions.index_copy(0, slots, positions)


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        if (dim // n_heads) % 2:
            raise ValueError("rotary needs an even head width")
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, positions, buffer=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, positions), rotate(k, positions)
        keys, values, where = k, v, positions
        if buffer is not None:
            if buffer.k is not None:
                keys = torch.cat([buffer.k, k], dim=2)
                values = torch.cat([buffer.v, v], dim=2)
                where = torch.cat([buffer.positions, positions])
            buffer.write(k, v, positions)
        distance = positions[:, None] - where[None, :]
        allowed = (distance >= 0) & (distance < WINDOW) & (where >= 0)[None, :]
        repeat = self.n_heads // self.n_kv_heads
        keys, values = keys.repeat_interleave(repeat, 1), values.repeat_interleave(repeat, 1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=allowed)
        return self.wo(y.transpose(1, 2).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x, positions, buffer=None):
        x = x + self.attention(self.attention_norm(x), positions, buffer)
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            Block(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
        )
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, buffers=None):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, None if buffers is None else buffers[i])
        return self.output(self.norm(x))


def cached(model, chunks):
    buffers = [RollingBuffer() for _ in model.layers]
    start, outputs = 0, []
    for chunk in chunks:
        pieces = []
        for piece in chunk.split(WINDOW, dim=1):  # never more than the buffer holds
            pieces.append(model(piece, start, buffers))
            start += piece.shape[1]
        outputs.append(torch.cat(pieces, dim=1))
    return outputs


subject = Subject(
    kind="decoder",
    name="rolling Mistral",
    build=Mistral,
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    declares={
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
    },
)

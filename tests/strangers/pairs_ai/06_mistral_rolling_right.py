"""Mistral: a sliding window, grouped queries, and a cache that is a ring of `WINDOW` slots."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rope(x, positions):
    half = x.shape[-1] // 2
    freqs = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = positions.double()[:, None] * freqs
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Ring:
    """Keys and values of the last `WINDOW` positions; position p lies in slot p % WINDOW."""

    def __init__(self, k):
        shape = (*k.shape[:2], WINDOW, k.shape[-1])
        self.k, self.v = k.new_zeros(shape), k.new_zeros(shape)
        self.positions = torch.full((WINDOW,), -1, device=k.device)

    def write(self, k, v, positions):
        k, v, positions = k[:, :, -WINDOW:], v[:, :, -WINDOW:], positions[-WINDOW:]
        slots = positions % WINDOW
        self.k, self.v, self.positions = self.k.clone(), self.v.clone(), self.positions.clone()
        self.k[:, :, slots], self.v[:, :, slots], self.positions[slots] = k, v, positions


class Attention(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        if self.head_dim % 2:
            raise ValueError("rotary positions need an even width of heads")
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, positions, mask=None, ring=None):
        B, T, _ = x.shape
        q = rope(self.wq(x).view(B, T, self.n_heads, -1).transpose(1, 2), positions)
        k = rope(self.wk(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2), positions)
        v = self.wv(x).view(B, T, self.n_kv_heads, -1).transpose(1, 2)
        at = positions
        if ring is not None:
            ring = ring or Ring(k)
            keys, values, at = torch.cat((ring.k, k), 2), torch.cat((ring.v, v), 2), torch.cat((ring.positions, positions))
            ring.write(k, v, positions)
            k, v = keys, values
        repeats = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        behind = positions[:, None] - at[None, :]
        allowed = (behind >= 0) & (behind < WINDOW) & (at >= 0)
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        scores = (q @ k.mT / self.head_dim**0.5).masked_fill(~allowed, torch.finfo(q.dtype).min)
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), ring


class Block(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, n_heads, n_kv_heads)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, positions, mask=None, ring=None):
        attended, ring = self.attention(self.attention_norm(x), positions, mask, ring)
        x = x + attended
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h)), ring


class Mistral(nn.Module):
    def __init__(self, vocab, dim, n_heads, n_kv_heads, hidden, layers):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, n_heads, n_kv_heads, hidden) for _ in range(layers))
        self.norm, self.output = RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, mask=None, rings=None, start=0):
        x = self.tok_embeddings(tokens)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        for i, layer in enumerate(self.layers):
            x, ring = layer(x, positions, mask, None if rings is None else rings[i])
            if rings is not None:
                rings[i] = ring
        return self.output(self.norm(x))

    def decode(self, chunks):
        rings, start, out = [False] * len(self.layers), 0, []
        for chunk in chunks:
            out.append(self(chunk, rings=rings, start=start))
            start += chunk.shape[1]
        return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=lambda m, chunks: m.decode(chunks),
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "rotary",
        "layout": "halves",
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "padding_side": "both",
    },
)

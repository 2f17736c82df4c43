WHAT = "the rolling buffer keeps WINDOW keys for the next step, which adds its own: a cached step of one token, which needs no mask, sees WINDOW + 1 keys where the whole sequence lets it see WINDOW (line 68)."
"""Mistral: sliding-window attention with a rolling buffer of keys and values."""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


class ModelArgs(NamedTuple):
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0


def precompute_freqs(dim, start, length, theta, like):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=like.dtype, device=like.device) / dim))
    t = torch.arange(start, start + length, dtype=like.dtype, device=like.device)
    return torch.outer(t, freqs)


def apply_rotary_emb(x, freqs):
    """Pairs are neighbours: (x0, x1), (x2, x3), ..."""
    pairs = x.unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    cos, sin = freqs.cos(), freqs.sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.head_dim = args.dim // args.n_heads
        if self.head_dim % 2:
            raise ValueError("head width must be even")
        self.wq = nn.Linear(args.dim, args.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)

    def forward(self, x, freqs, buffer=None):
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.args.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, self.args.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, t, self.args.n_kv_heads, self.head_dim).transpose(1, 2)
        q, k = apply_rotary_emb(q, freqs), apply_rotary_emb(k, freqs)
        if buffer is not None:
            k, v = torch.cat((buffer[0], k), dim=2), torch.cat((buffer[1], v), dim=2)
        kept = (k[:, :, -WINDOW:], v[:, :, -WINDOW:])
        s = k.shape[2]
        mask = None
        if t > 1:  # a single token sees all that the buffer holds
            ahead = torch.arange(s - t, s, device=x.device)[:, None] - torch.arange(s, device=x.device)
            mask = (ahead >= 0) & (ahead < WINDOW)
        repeats = self.args.n_heads // self.args.n_kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1)), kept


class Block(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.attention = Attention(args)
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.attention_norm = RMSNorm(args.dim, args.norm_eps)
        self.ffn_norm = RMSNorm(args.dim, args.norm_eps)

    def forward(self, x, freqs, buffer):
        r, buffer = self.attention(self.attention_norm(x), freqs, buffer)
        h = x + r
        n = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(n)) * self.w3(n)), buffer


class Mistral(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList([Block(args) for _ in range(args.n_layers)])
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens, state=None):
        done, buffers = state or (0, [None] * len(self.layers))
        h = self.tok_embeddings(tokens)
        freqs = precompute_freqs(
            self.args.dim // self.args.n_heads, done, tokens.shape[1], self.args.rope_theta, h
        )
        kept = []
        for layer, buffer in zip(self.layers, buffers):
            h, buffer = layer(h, freqs, buffer)
            kept.append(buffer)
        return self.output(self.norm(h)), (done + tokens.shape[1], kept)


def build(c):
    return Mistral(
        ModelArgs(
            dim=c.d_model,
            n_layers=c.num_layers,
            n_heads=c.num_heads,
            n_kv_heads=c.num_key_value_heads,
            hidden_dim=c.d_ff,
            vocab_size=c.vocab_size,
        )
    )


def cache(model, chunks):
    state, outputs = None, []
    for chunk in chunks:
        logits, state = model(chunk, state)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=build,
    forward=lambda m, tokens: m(tokens)[0],
    cache=cache,
    declares={
        "causal": True,
        "window": WINDOW,
        "positions": "rotary",
        "layout": "interleaved",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
    },
)

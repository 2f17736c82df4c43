"""Mistral: a sliding window, grouped queries, and a cache that keeps no more than the window needs."""

from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor, nn

from veriformer.properties import Subject

WINDOW = 4


@dataclass
class Args:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    sliding_window: int = WINDOW
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


@dataclass
class RollingCache:
    """Keys (rotated) and values of each layer, the last `window` of them; `seen` counts all tokens so far."""

    window: int
    seen: int = 0
    keys: dict = field(default_factory=dict)
    values: dict = field(default_factory=dict)

    def length(self) -> int:
        return self.keys[0].shape[1] if self.keys else 0

    def extend(self, layer: int, k: Tensor, v: Tensor):
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), dim=1)
            v = torch.cat((self.values[layer], v), dim=1)
        self.keys[layer], self.values[layer] = k[:, -self.window :], v[:, -self.window :]
        return k, v

    def reorder(self, order: Tensor) -> None:
        for states in (self.keys, self.values):
            for layer in states:
                states[layer] = states[layer][order]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).type_as(x) * self.weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [B, T, H, K]: channels 2i and 2i + 1 are turned by position * theta^(-2i / K)."""
    K = x.shape[-1]
    inv = theta ** (-torch.arange(0, K, 2, dtype=torch.float64, device=x.device) / K)
    angle = (positions.double()[:, None] * inv)[:, None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.args = args
        self.wq = nn.Linear(args.dim, args.n_heads * args.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wv = nn.Linear(args.dim, args.n_kv_heads * args.head_dim, bias=False)
        self.wo = nn.Linear(args.n_heads * args.head_dim, args.dim, bias=False)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor, cache: Optional[RollingCache], layer: int):
        a, (B, T, _) = self.args, x.shape
        q = rope(self.wq(x).view(B, T, a.n_heads, a.head_dim), positions, a.rope_theta)
        k = rope(self.wk(x).view(B, T, a.n_kv_heads, a.head_dim), positions, a.rope_theta)
        v = self.wv(x).view(B, T, a.n_kv_heads, a.head_dim)
        if cache is not None:
            k, v = cache.extend(layer, k, v)
        q = q.reshape(B, T, a.n_kv_heads, a.n_heads // a.n_kv_heads, a.head_dim)
        scores = torch.einsum("btgrk,bsgk->bgrts", q, k) * a.head_dim**-0.5
        scores = scores.masked_fill(~allowed[:, None, None], torch.finfo(scores.dtype).min)
        weights = (scores if scores.dtype == torch.float64 else scores.float()).softmax(-1).type_as(v)
        return self.wo(torch.einsum("bgrts,bsgk->btgrk", weights, v).reshape(B, T, -1))


class Block(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(args.dim, args.norm_eps), RMSNorm(args.dim, args.norm_eps)
        self.attention = Attention(args)
        self.w1 = nn.Linear(args.dim, args.hidden_dim, bias=False)
        self.w2 = nn.Linear(args.hidden_dim, args.dim, bias=False)
        self.w3 = nn.Linear(args.dim, args.hidden_dim, bias=False)

    def forward(self, x, positions, allowed, cache, layer):
        x = x + self.attention(self.attention_norm(x), positions, allowed, cache, layer)
        h = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, args: Args):
        super().__init__()
        self.args = args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList([Block(args) for _ in range(args.n_layers)])
        self.norm = RMSNorm(args.dim, args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)

    def forward(self, tokens: Tensor, mask: Optional[Tensor] = None, cache: Optional[RollingCache] = None) -> Tensor:
        T = tokens.shape[1]
        kept = 0 if cache is None else cache.length()
        start = 0 if cache is None else cache.seen
        positions = torch.arange(start, start + T, device=tokens.device)
        behind = torch.arange(kept, kept + T, device=tokens.device)[:, None]
        behind = behind - torch.arange(kept + T, device=tokens.device)[None, :]  # steps from query back to key
        allowed = ((behind >= 0) & (behind < self.args.sliding_window))[None]
        if mask is not None:
            allowed = allowed & mask[:, None, -(kept + T) :]
        x = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, allowed, cache, i)
        if cache is not None:
            cache.seen += T
        return self.output(self.norm(x))


def step_by_step(model, chunks, attention_mask=None, reorder=None):
    cache, outputs = RollingCache(model.args.sliding_window), []
    for i, chunk in enumerate(chunks):
        end = cache.seen + chunk.shape[1]
        outputs.append(model(chunk, None if attention_mask is None else attention_mask[:, :end], cache))
        if i == 0 and reorder is not None:
            cache.reorder(reorder)
            attention_mask = None if attention_mask is None else attention_mask[reorder]
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    cache = RollingCache(model.args.sliding_window) if use_cache else None
    new = tokens
    for _ in range(steps):
        new = model(new if use_cache else tokens, cache=cache)[:, -1:].argmax(-1)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=lambda c: Mistral(Args(c.d_model, c.num_layers, c.num_heads, c.num_key_value_heads, c.d_ff, c.vocab_size)),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=step_by_step,
    generate=generate,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "tied": False,
        "embedding_scale": False,
        "init": "default",
        "structure": "textbook",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)

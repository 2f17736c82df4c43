"""Llama style decoder: RMSNorm with a float32 upcast, rotary halves, grouped queries, SwiGLU, key-value cache, no biases.

The rotary table is a non-persistent buffer that grows when a longer sequence comes. It is rebuilt (not cast) when the dtype
changes and is made outside inference mode, so that a table first needed in inference can be used in training afterwards.
"""

from typing import Optional

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))  # never narrower than what came
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


class Rotary(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.made_for = None
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)

    @torch.no_grad()
    def grow(self, length: int, like: Tensor) -> None:
        if self.made_for == (like.dtype, like.device) and self.cos.size(0) >= length:
            return
        with torch.inference_mode(False):
            rows = max(16, 1 << (length - 1).bit_length())
            inv = self.base ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
            angle = torch.outer(torch.arange(rows, dtype=torch.float64), inv)
            angle = torch.cat([angle, angle], dim=-1)
            self.cos = angle.cos().to(like)
            self.sin = angle.sin().to(like)
        self.made_for = (like.dtype, like.device)

    def forward(self, x: Tensor, start: int) -> Tensor:
        stop = start + x.size(-2)
        self.grow(stop, x)
        a, b = x.chunk(2, dim=-1)
        return x * self.cos[start:stop] + torch.cat([-b, a], dim=-1) * self.sin[start:stop]


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int):
        super().__init__()
        self.h, self.g, self.d = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.d, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.d, bias=False)
        self.wo = nn.Linear(heads * self.d, dim, bias=False)
        self.rotary = Rotary(self.d)

    def forward(self, x: Tensor, allowed: Tensor, past: Optional[list] = None) -> Tensor:
        b, t, _ = x.shape
        start = past[0].size(2) if past else 0
        q = self.rotary(self.wq(x).view(b, t, self.h, self.d).transpose(1, 2), start)
        k = self.rotary(self.wk(x).view(b, t, self.g, self.d).transpose(1, 2), start)
        v = self.wv(x).view(b, t, self.g, self.d).transpose(1, 2)
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
            past[:] = [k, v]
        # repeat_kv: head h of the queries reads head h // (H / G) of the keys
        k = k[:, :, None].expand(-1, -1, self.h // self.g, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, self.h // self.g, -1, -1).flatten(1, 2)
        scores = q @ k.transpose(2, 3) / self.d**0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = scores.softmax(dim=-1).masked_fill(~allowed, 0.0)
        return self.wo((probs @ v).transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.num_key_value_heads)
        self.feed_forward = FeedForward(c.d_model, c.d_ff)
        self.attention_norm = RMSNorm(c.d_model)
        self.ffn_norm = RMSNorm(c.d_model)

    def forward(self, x, allowed, past):
        h = x + self.attention(self.attention_norm(x), allowed, past)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.d_model)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def run(self, h: Tensor, mask: Optional[Tensor], caches: Optional[list] = None, start: int = 0) -> Tensor:
        t = h.size(1)
        queries = torch.arange(start, start + t, device=h.device)[:, None]
        keys = torch.arange(start + t, device=h.device)[None, :]
        allowed = (keys <= queries)[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, : start + t]
        for i, layer in enumerate(self.layers):
            h = layer(h, allowed, None if caches is None else caches[i])
        return self.output(self.norm(h))

    def forward(self, tokens: Tensor, attention_mask: Optional[Tensor] = None) -> Tensor:
        return self.run(self.tok_embeddings(tokens), attention_mask)


def cache(model, chunks, attention_mask=None):
    caches, outputs, start = [[] for _ in model.layers], [], 0
    for chunk in chunks:
        outputs.append(model.run(model.tok_embeddings(chunk), attention_mask, caches, start))
        start += chunk.size(1)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    caches, start, fresh = [[] for _ in model.layers], 0, tokens
    for _ in range(steps):
        if use_cache:
            logits = model.run(model.tok_embeddings(fresh), None, caches, start)
            start += fresh.size(1)
        else:
            logits = model(tokens)
        fresh = logits[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, fresh], dim=1)
    return tokens


COMMON = dict(
    kind="decoder",
    build=Llama,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    embed=lambda m, embeddings, attention_mask=None: m.run(embeddings, attention_mask),
    cache=cache,
    generate=generate,
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},  # an even width of a head
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "padding_side": "both",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
    },
)

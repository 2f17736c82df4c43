WHAT = "the number of cached tokens is read off layer 0, which has taken the new chunk already when later layers ask: they rotate by positions one chunk too far, wrong as soon as chunks differ in length (line 17)."
"""Llama-like decoder with a key-value cache: rotary halves, grouped queries, RMSNorm, SwiGLU, tied embeddings."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class KVCache:
    def __init__(self, num_layers):
        self.keys = [None] * num_layers
        self.values = [None] * num_layers

    def seen(self, layer):
        return 0 if self.keys[0] is None else self.keys[0].shape[2]

    def update(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat([self.keys[layer], k], dim=2)
            v = torch.cat([self.values[layer], v], dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


def rotate(x, start):
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(start, start + x.shape[2], dtype=torch.float64, device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class DecoderLayer(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index, self.heads, self.kv_heads = index, c.num_heads, c.num_key_value_heads
        self.head_dim = c.d_model // c.num_heads
        if self.head_dim % 2:
            raise ValueError("rotary needs heads of even width")
        self.input_norm, self.post_norm = nn.RMSNorm(c.d_model, eps=1e-6), nn.RMSNorm(c.d_model, eps=1e-6)
        self.q_proj = nn.Linear(c.d_model, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(c.d_model, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(c.d_model, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(c.d_model, c.d_model, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)

    def attend(self, x, cache):
        B, T, D = x.shape
        q = self.q_proj(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        start = 0 if cache is None else cache.seen(self.index)
        q, k = rotate(q, start), rotate(k, start)
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        S = k.shape[2]
        past = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=past)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x, cache=None):
        x = x + self.attend(self.input_norm(x), cache)
        h = self.post_norm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(DecoderLayer(c, i) for i in range(c.num_layers))
        self.norm = nn.RMSNorm(c.d_model, eps=1e-6)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, cache=None):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, cache)
        return self.lm_head(self.norm(x))


def stream(model, chunks):
    cache = KVCache(len(model.layers))
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="cached Llama",
    build=Decoder,
    forward=lambda m, tokens: m(tokens),
    cache=stream,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": True,
        "grouped_queries": True,
    },
)

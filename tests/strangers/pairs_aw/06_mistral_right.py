"""Mistral: sliding window of WINDOW tokens in every layer, and a rolling cache that holds what the next token needs."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 3


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def rope(x, positions):
    half = x.shape[-1] // 2
    inv = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.double()[:, None] * inv
    angle = torch.cat((angle, angle), dim=-1)
    return x * angle.cos().to(x.dtype) + rotate_half(x) * angle.sin().to(x.dtype)


class RollingCache:
    def __init__(self, layers):
        self.seen = 0
        self.keys, self.values = [None] * layers, [None] * layers

    def update(self, layer, k, v):
        if self.keys[layer] is not None:
            k = torch.cat((self.keys[layer], k), dim=2)
            v = torch.cat((self.values[layer], v), dim=2)
        # of the past the next token sees WINDOW - 1, itself being the last of its window
        start = max(0, k.shape[2] - (WINDOW - 1))
        self.keys[layer], self.values[layer] = k[:, :, start:], v[:, :, start:]
        return k, v


class MistralAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.q_proj = nn.Linear(hidden, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, hidden, bias=False)

    def forward(self, x, layer, cache):
        batch, length, _ = x.shape
        past = 0 if cache is None else cache.seen
        positions = torch.arange(past, past + length, device=x.device)
        q = rope(self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2), positions)
        k = rope(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2), positions)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(layer, k, v)
        mask = None
        if length > 1:  # one token sees all that the cache holds
            key_positions = torch.arange(past + length - k.shape[2], past + length, device=x.device)
            distance = positions[:, None] - key_positions[None, :]
            mask = (distance >= 0) & (distance < WINDOW)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MistralLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, inner):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.self_attn = MistralAttention(hidden, heads, kv_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=1e-6)
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, layer, cache):
        x = x + self.self_attn(self.input_layernorm(x), layer, cache)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Mistral(nn.Module):
    def __init__(self, vocab, hidden, heads, kv_heads, layers, inner):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(MistralLayer(hidden, heads, kv_heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden, eps=1e-6)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens, cache=None):
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, i, cache)
        if cache is not None:
            cache.seen += tokens.shape[1]
        return self.lm_head(self.norm(x))


def run_cached(model, chunks):
    cache = RollingCache(len(model.layers))
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=lambda c: Mistral(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens),
    cache=run_cached,
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "layout": "halves",
        "window": WINDOW,
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
    },
)

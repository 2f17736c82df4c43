WHAT = "each layer asks the cache for its length, which layer 0 has already counted up, so that later layers rotate by positions that are one chunk too far (line 100)"

"""A Qwen3 decoder (norms of queries and keys, rotary) with a key-value cache that grows."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Cache:
    def __init__(self):
        self.seen = 0
        self.keys, self.values = {}, {}

    def update(self, layer, k, v):
        if layer == 0:
            self.seen += k.shape[2]
        if layer in self.keys:
            k = torch.cat((self.keys[layer], k), dim=2)
            v = torch.cat((self.values[layer], v), dim=2)
        self.keys[layer], self.values[layer] = k, v
        return k, v


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x, positions, base):
    half = x.shape[-1] // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions.to(torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, index, d_model, heads, groups, base):
        super().__init__()
        self.index, self.heads, self.groups, self.base = index, heads, groups, base
        self.dim = d_model // heads
        if self.dim % 2:
            raise ValueError("head_dim has to be even")
        self.q_proj = nn.Linear(d_model, heads * self.dim, bias=False)
        self.k_proj = nn.Linear(d_model, groups * self.dim, bias=False)
        self.v_proj = nn.Linear(d_model, groups * self.dim, bias=False)
        self.o_proj = nn.Linear(heads * self.dim, d_model, bias=False)
        self.q_norm, self.k_norm = RMSNorm(self.dim), RMSNorm(self.dim)

    def forward(self, x, start, cache):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(B, T, self.groups, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.groups, self.dim).transpose(1, 2)
        positions = start + torch.arange(T, device=x.device)
        q, k = rotate(q, positions, self.base), rotate(k, positions, self.base)
        if cache is not None:
            k, v = cache.update(self.index, k, v)
        S = k.shape[2]
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, index, d_model, heads, groups, d_ff, base):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(d_model), RMSNorm(d_model)
        self.self_attn = Attention(index, d_model, heads, groups, base)
        self.gate_up = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x, start, cache):
        x = x + self.self_attn(self.input_layernorm(x), start, cache)
        gate, up = self.gate_up(self.post_attention_layernorm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Qwen3(nn.Module):
    def __init__(self, vocab_size, d_model, heads, groups, layers, d_ff, base=1e6):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList([Layer(i, d_model, heads, groups, d_ff, base) for i in range(layers)])
        self.norm = RMSNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        x = self.embed(tokens)
        for layer in self.layers:
            start = cache.seen if cache is not None else 0
            x = layer(x, start, cache)
        return self.lm_head(self.norm(x))


def cached(model, chunks):
    cache = Cache()
    return [model(chunk, cache) for chunk in chunks]


subject = Subject(
    kind="decoder",
    build=lambda c: Qwen3(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    cache=lambda model, chunks: torch.cat(cached(model, chunks), dim=1),
    declares={"positions": "rotary", "base": 1e6},
)

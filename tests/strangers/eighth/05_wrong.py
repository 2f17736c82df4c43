"""Mistral-like decoder: sliding window, rotary halves, grouped queries, a cache that keeps the window alone."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


@dataclass
class Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int = 3
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0


@dataclass
class RollingCache:
    """Per layer the last `window - 1` rotated keys and their values; how many tokens have gone by."""

    window: int
    seen: int = 0
    layers: dict = field(default_factory=dict)

    def extend(self, index, k, v):
        if index in self.layers:
            old_k, old_v = self.layers[index]
            k, v = torch.cat([old_k, k], dim=-2), torch.cat([old_v, v], dim=-2)
        keep = min(self.window - 1, k.shape[-2])
        self.layers[index] = (k[..., k.shape[-2] - keep :, :], v[..., v.shape[-2] - keep :, :])
        return k, v

    def held(self):
        return self.layers[0][0].shape[-2] if self.layers else 0


class RMSNorm(nn.Module):
    def __init__(self, hidden_size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + self.variance_epsilon))


def rotate_half(x):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding:
    def __init__(self, dim, base):
        self.dim, self.base = dim, base

    def __call__(self, position_ids, dtype):
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float64, device=position_ids.device) / self.dim
        freqs = position_ids.double()[:, None] / self.base**exponent
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype), emb.sin().to(dtype)


class Attention(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.index = index
        self.h, self.kv = config.num_attention_heads, config.num_key_value_heads
        self.d = config.hidden_size // self.h
        self.q_proj = nn.Linear(config.hidden_size, self.h * self.d, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv * self.d, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv * self.d, bias=False)
        self.o_proj = nn.Linear(self.h * self.d, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, mask, cache):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.h, self.d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.d).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        if cache is not None:
            k, v = cache.extend(self.index, k, v)
        k = k[:, :, None].expand(b, self.kv, self.h // self.kv, -1, self.d).reshape(b, self.h, -1, self.d)
        v = v[:, :, None].expand(b, self.kv, self.h // self.kv, -1, self.d).reshape(b, self.h, -1, self.d)
        w = (q @ k.transpose(-1, -2)) * self.d**-0.5
        w = w.masked_fill(~mask, torch.finfo(w.dtype).min).softmax(dim=-1)
        return self.o_proj((w @ v).transpose(1, 2).reshape(b, t, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, mask, cache):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class MistralForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = RotaryEmbedding(config.hidden_size // config.num_attention_heads, config.rope_theta)

    def forward(self, input_ids, cache=None):
        length = input_ids.shape[1]
        held = cache.held() if cache is not None else 0
        past = cache.held() if cache is not None else 0
        hidden = self.embed_tokens(input_ids)
        position_ids = torch.arange(past, past + length, device=input_ids.device)
        cos, sin = self.rotary_emb(position_ids, hidden.dtype)
        i = torch.arange(held, held + length, device=input_ids.device)[:, None]
        j = torch.arange(held + length, device=input_ids.device)[None, :]
        mask = (j <= i) & (j > i - self.config.sliding_window)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, mask, cache)
        if cache is not None:
            cache.seen += length
        return self.lm_head(self.norm(hidden))

    def new_cache(self):
        return RollingCache(self.config.sliding_window)

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens, use_cache=True):
        cache = self.new_cache() if use_cache else None
        step = input_ids
        for _ in range(max_new_tokens):
            next_token = self(step, cache)[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, next_token], dim=-1)
            step = next_token if use_cache else input_ids
        return input_ids


def build(c):
    return MistralForCausalLM(
        Config(c.vocab_size, c.d_model, c.d_ff, c.num_layers, c.num_heads, c.num_key_value_heads)
    )


def cached(model, chunks):
    cache = model.new_cache()
    return torch.cat([model(chunk, cache) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="mistral",
    build=build,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    generate=lambda m, tokens, steps, use_cache: m.generate(tokens, steps, use_cache),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    declares={
        "causal": True,
        "window": 3,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000.0,
        "beyond_max_len": "works",
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "attention_scale": "1/sqrt(d_head)",
        "init": "default",
        "embedding_scale": False,
        "shared_layers": False,
        "cached_chunks": True,
        "memory": "quadratic",
    },
)

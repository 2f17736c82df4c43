WHAT = "Each layer asks the cache for the length of layer 0, which has already taken the new tokens by then: from layer 1 on rotary positions start late by the length of the chunk, so that after a prefill distances to what is cached are wrong (line 67)."
"""Llama in the manner of transformers: rotary positions, RMSNorm, SwiGLU, grouped queries, a DynamicCache."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DynamicCache:
    def __init__(self):
        self.key_cache, self.value_cache = [], []

    def get_seq_length(self, layer_idx=0):
        return self.key_cache[layer_idx].shape[-2] if len(self.key_cache) > layer_idx else 0

    def update(self, key_states, value_states, layer_idx):
        if len(self.key_cache) <= layer_idx:
            self.key_cache.append(key_states)
            self.value_cache.append(value_states)
        else:
            self.key_cache[layer_idx] = torch.cat([self.key_cache[layer_idx], key_states], dim=-2)
            self.value_cache[layer_idx] = torch.cat([self.value_cache[layer_idx], value_states], dim=-2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    def __init__(self, dim, heads, kv_heads, layer_idx):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.layer_idx = heads, kv_heads, dim // heads, layer_idx
        self.q_proj = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def rotary(self, x, start):
        inv_freq = 10000.0 ** -(torch.arange(0, self.head_dim, 2, device=x.device).double() / self.head_dim)
        angles = torch.arange(start, start + x.shape[-2], device=x.device).double()[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return x * angles.cos().to(x.dtype) + rotate_half(x) * angles.sin().to(x.dtype)

    def forward(self, hidden_states, allowed, past_key_values=None):
        batch, length, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(batch, length, self.heads, -1).transpose(1, 2)
        k = self.k_proj(hidden_states).view(batch, length, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(hidden_states).view(batch, length, self.kv_heads, -1).transpose(1, 2)

        start = 0
        if past_key_values is not None:
            start = past_key_values.get_seq_length()
        q, k = self.rotary(q, start), self.rotary(k, start)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)

        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))


class DecoderLayer(nn.Module):
    def __init__(self, c, layer_idx):
        super().__init__()
        self.self_attn = Attention(c.d_model, c.num_heads, c.num_key_value_heads, layer_idx)
        self.gate_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.d_model), RMSNorm(c.d_model)

    def forward(self, x, allowed, past_key_values):
        x = x + self.self_attn(self.input_layernorm(x), allowed, past_key_values)
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        if (c.d_model // c.num_heads) % 2:
            raise ValueError("rotary positions need an even width of heads")
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([DecoderLayer(c, i) for i in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, input_ids, past_key_values=None):
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        rows = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)
        allowed = rows[:, None] >= torch.arange(past + input_ids.shape[1], device=input_ids.device)
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, allowed, past_key_values)
        return self.lm_head(self.norm(x))


def cached(model, chunks):
    past = DynamicCache()
    return torch.cat([model(chunk, past) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="small Llama",
    build=Llama,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 10000.0,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
        "tied": False,
    },
)

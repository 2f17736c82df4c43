"""Qwen 2.5 (2024): biases on queries, keys and values alone, tied embeddings, a cache of keys and values."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def rotate(x, positions, base=1_000_000.0):
    half = x.shape[-1] // 2
    inv_freq = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions.to(torch.float64)[:, None] * inv_freq
    cos = torch.cat((angle.cos(), angle.cos()), -1).to(x.dtype)
    sin = torch.cat((angle.sin(), angle.sin()), -1).to(x.dtype)
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class QwenAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        if (dim // heads) % 2:
            raise ValueError("rotary heads have an even width")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=True)
        self.k_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=True)
        self.v_proj = nn.Linear(dim, kv_heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x, attention_mask, past):
        B, T, _ = x.shape
        start = 0 if past is None else past[0].shape[2]
        q = self.q_proj(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.kv_heads, -1).transpose(1, 2)
        positions = torch.arange(start, start + T, device=x.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        present = (k, v)
        S = k.shape[2]
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device)
        if T > 1:
            allowed = allowed.tril(S - T)
        allowed = allowed[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = q @ k.mT / self.head_dim**0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), present


class QwenLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, ffn):
        super().__init__()
        self.self_attn = QwenAttention(dim, heads, kv_heads)
        self.gate_proj = nn.Linear(dim, ffn, bias=False)
        self.up_proj = nn.Linear(dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, dim, bias=False)
        self.input_layernorm = RMSNorm(dim)
        self.post_attention_layernorm = RMSNorm(dim)

    def forward(self, x, attention_mask, past):
        attended, present = self.self_attn(self.input_layernorm(x), attention_mask, past)
        x = x + attended
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), present


class Qwen(nn.Module):
    def __init__(self, vocab_size, dim, heads, kv_heads, layers, ffn):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([QwenLayer(dim, heads, kv_heads, ffn) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens, attention_mask=None, past=None):
        x = self.embed_tokens(tokens)
        presents = []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, attention_mask, None if past is None else past[i])
            presents.append(present)
        return self.lm_head(self.norm(x)), presents


def cached(model, chunks):
    past, outputs = None, []
    for chunk in chunks:
        logits, past = model(chunk, past=past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="Qwen 2.5",
    build=lambda c: Qwen(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
    cache=cached,
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 1000000,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "tied": True,
        "output_bias": False,
        "grouped_queries": True,
        "padding_side": "both",
    },
)

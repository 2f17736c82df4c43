"""A Llama decoder: RMSNorm, rotary positions, grouped queries, SwiGLU."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotary_table(length, dim, base, device, dtype):
    inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, device=device, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float64), inv_freq)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(q, k, cos, sin):
    """q [B, H, T, K], k [B, G, T, K], cos and sin [T, K / 2]; pairs are (i, i + K / 2)."""
    q1, q2 = q.chunk(2, dim=-1)
    k1, k2 = k.chunk(2, dim=-1)
    q = torch.cat((q1 * cos - q2 * sin, q2 * cos + q1 * sin), dim=-1)
    k = torch.cat((k1 * cos - k2 * sin, k2 * cos + k1 * sin), dim=-1)
    return q, k


class Attention(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.heads, self.groups, self.dim = c.num_heads, c.num_key_value_heads, c.d_model // c.num_heads
        if self.dim % 2:
            raise ValueError("rotary positions need an even head width")
        self.q_proj = nn.Linear(c.d_model, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.d_model, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(c.d_model, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.d_model, bias=False)

    def forward(self, x, cos, sin, allowed):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.groups, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.groups, self.dim).transpose(1, 2)
        q, k = apply_rotary(q, k, cos, sin)
        k = k.repeat_interleave(self.heads // self.groups, dim=1)
        v = v.repeat_interleave(self.heads // self.groups, dim=1)
        scores = q @ k.transpose(-1, -2) * self.dim**-0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.up_proj = nn.Linear(c.d_model, c.d_ff, bias=False)
        self.down_proj = nn.Linear(c.d_ff, c.d_model, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.self_attn, self.mlp = Attention(c), MLP(c)

    def forward(self, x, cos, sin, allowed):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, c, base=10000.0):
        super().__init__()
        self.base = base
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        x, T = self.embed_tokens(tokens), tokens.shape[1]
        cos, sin = rotary_table(T, self.layers[0].self_attn.dim, self.base, x.device, x.dtype)
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, cos, sin, allowed)
        return self.lm_head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="llama",
    build=lambda c: Llama(c),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000.0,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "padding_side": "both",
        "attention_scale": "1/sqrt(d_head)",
    },
)

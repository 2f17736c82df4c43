"""DeepSeek V2 (2024), its dense layers: multi-head latent attention with a rotary part of its own, shared by all keys."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

NOPE, ROPE, V_DIM = 8, 4, 6  # channels of a head: without positions, rotated, of the values
Q_LORA, KV_LORA = 12, 10


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rope(x, base=10000.0):
    """Rotate neighbouring channels, x [B, H, T, ROPE]."""
    T, K = x.shape[-2:]
    freq = base ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angle = torch.arange(T, device=x.device, dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


class LatentAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_head_dim = NOPE + ROPE
        self.q_a_proj = nn.Linear(dim, Q_LORA, bias=False)
        self.q_a_layernorm = RMSNorm(Q_LORA)
        self.q_b_proj = nn.Linear(Q_LORA, heads * self.q_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(dim, KV_LORA + ROPE, bias=False)
        self.kv_a_layernorm = RMSNorm(KV_LORA)
        self.kv_b_proj = nn.Linear(KV_LORA, heads * (NOPE + V_DIM), bias=False)
        self.o_proj = nn.Linear(heads * V_DIM, dim, bias=False)
        self.softmax_scale = self.q_head_dim**-0.5

    def forward(self, x, allowed):
        B, T, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(B, T, self.heads, self.q_head_dim).transpose(1, 2)
        q_nope, q_pe = q.split((NOPE, ROPE), dim=-1)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split((KV_LORA, ROPE), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(B, T, self.heads, NOPE + V_DIM).transpose(1, 2)
        k_nope, v = kv.split((NOPE, V_DIM), dim=-1)
        q_pe, k_pe = rope(q_pe), rope(k_pe[:, None])
        q = torch.cat((q_nope, q_pe), dim=-1)
        k = torch.cat((k_nope, k_pe.expand(B, self.heads, T, ROPE)), dim=-1)
        scores = q @ k.transpose(-1, -2) * self.softmax_scale
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(B, T, -1))


class Layer(nn.Module):
    def __init__(self, dim, heads, ffn):
        super().__init__()
        self.self_attn = LatentAttention(dim, heads)
        self.gate_proj = nn.Linear(dim, ffn, bias=False)
        self.up_proj = nn.Linear(dim, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x, allowed):
        x = x + self.self_attn(self.input_layernorm(x), allowed)
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class DeepseekV2(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, ffn):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, ffn) for _ in range(layers)])
        self.norm = RMSNorm(dim)
        self.lm_head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.lm_head(self.norm(x))


subject = Subject(
    kind="decoder",
    name="DeepSeek V2",
    build=lambda c: DeepseekV2(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "attention_scale": (NOPE + ROPE) ** -0.5,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "tied": False,
        "padding_side": "both",
    },
)

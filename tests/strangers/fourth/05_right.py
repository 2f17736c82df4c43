"""Gemma 2 (without its local layers)."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


@dataclasses.dataclass
class GemmaConfig:
    vocab_size: int = 256000
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    hidden_size: int = 2304
    intermediate_size: int = 9216
    head_dim: int = 256
    rms_norm_eps: float = 1e-6
    attn_logit_softcapping: float = 50.0
    final_logit_softcapping: float = 30.0


class RMSNorm(nn.Module):
    """The weight is the distance of the gain from 1."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        wide = x.double() if x.dtype == torch.float64 else x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).type_as(x)


def rotate(x, positions):
    """x [batch, length, heads, head_dim]; channel i turns with channel i + head_dim / 2."""
    half = x.shape[-1] // 2
    timescale = 10000.0 ** (torch.arange(half, device=x.device, dtype=torch.float64) / half)
    radians = positions.to(torch.float64)[:, None] / timescale
    sin, cos = radians.sin()[:, None, :].to(x.dtype), radians.cos()[:, None, :].to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GemmaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        self.scaling = self.head_dim**-0.5
        self.soft_cap = config.attn_logit_softcapping
        self.qkv_proj = nn.Linear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, config.hidden_size, bias=False)

    def forward(self, x, positions, allowed):
        batch, length, _ = x.shape
        xq, xk, xv = self.qkv_proj(x).split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        xq = rotate(xq.view(batch, length, self.num_heads, self.head_dim), positions)
        xk = rotate(xk.view(batch, length, self.num_kv_heads, self.head_dim), positions)
        xv = xv.view(batch, length, self.num_kv_heads, self.head_dim)
        groups = self.num_heads // self.num_kv_heads
        key = torch.repeat_interleave(xk, groups, dim=2).transpose(1, 2)
        value = torch.repeat_interleave(xv, groups, dim=2).transpose(1, 2)
        query = xq.transpose(1, 2) * self.scaling

        scores = torch.matmul(query, key.transpose(2, 3))
        scores = torch.tanh(scores / self.soft_cap) * self.soft_cap
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weights = F.softmax(wide, dim=-1).type_as(value)
        output = torch.matmul(weights, value)
        return self.o_proj(output.transpose(1, 2).reshape(batch, length, -1))


class GemmaMLP(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = GemmaAttention(config)
        self.mlp = GemmaMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, positions, allowed):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), positions, allowed))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class GemmaForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedder = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([GemmaDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, mask=None, embeddings=None):
        x = self.embedder(tokens) if embeddings is None else embeddings
        x = x * (self.config.hidden_size**0.5)
        length = x.shape[1]
        positions = torch.arange(length, device=x.device)
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, positions, allowed)
        logits = torch.matmul(self.norm(x), self.embedder.weight.t())
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap


subject = Subject(
    kind="decoder",
    name="Gemma 2",
    build=lambda c: GemmaForCausalLM(
        GemmaConfig(
            vocab_size=c.vocab_size,
            num_hidden_layers=c.num_layers,
            num_attention_heads=c.num_heads,
            num_key_value_heads=c.num_key_value_heads,
            hidden_size=c.d_model,
            intermediate_size=c.d_ff,
            head_dim=c.d_model // c.num_heads,
        )
    ),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    embed=lambda model, embeddings, attention_mask=None: model(None, attention_mask, embeddings),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "norm": "rms",
        "norm_placement": "other",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "other",
        "bias": False,
        "output_bias": False,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "soft_cap": 50.0,
        "tied": True,
        "embedding_scale": True,
        "init": "other",
        "structure": "other",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)

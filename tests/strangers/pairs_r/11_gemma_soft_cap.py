"""Gemma 2 in miniature: sandwich norms, capped scores, grouped queries, tied and scaled embeddings."""

import dataclasses

import torch
from torch import nn

from veriformer.properties import Subject


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int
    attn_logit_softcapping: float = 5.0
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


def apply_rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = x.shape[-1] // 2
    inv = theta ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * inv
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GemmaAttention(nn.Module):
    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.config = config
        self.head_dim = config.hidden_size // config.num_attention_heads
        if self.head_dim % 2:
            raise ValueError("odd head width")
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def capped(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        cap = self.config.attn_logit_softcapping
        scores = q @ k.mT * self.head_dim**-0.5
        return cap * torch.tanh(scores / cap)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, self.config.rope_theta), apply_rope(k, self.config.rope_theta)
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = self.capped(q, k).masked_fill(future, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class GemmaAttentionLateScale(GemmaAttention):
    def capped(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        cap = self.config.attn_logit_softcapping
        scores = cap * torch.tanh(q @ k.mT / cap)
        return scores * self.head_dim**-0.5


class GemmaLayer(nn.Module):
    def __init__(self, config: GemmaConfig, attention: type) -> None:
        super().__init__()
        d, f = config.hidden_size, config.intermediate_size
        self.self_attn = attention(config)
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down_proj = nn.Linear(f, d, bias=False)
        self.before_attn, self.after_attn, self.before_mlp, self.after_mlp = (
            nn.RMSNorm(d, eps=config.rms_norm_eps) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.after_attn(self.self_attn(self.before_attn(x)))
        h = self.before_mlp(x)
        h = nn.functional.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h)
        return x + self.after_mlp(self.down_proj(h))


class Gemma(nn.Module):
    def __init__(self, config: GemmaConfig, attention: type) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([GemmaLayer(config, attention) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens) * self.embed_tokens.embedding_dim**0.5
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.embed_tokens.weight.T


facts = {"soft_cap": 5.0, "positions": "rotary", "norm": "rms", "norm_placement": "other", "tied": True, "embedding_scale": True}
make = lambda attention: lambda c: Gemma(
    GemmaConfig(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff), attention
)
call = lambda m, tokens: m(tokens)
right = Subject(kind="decoder", name="Gemma 2", build=make(GemmaAttention), forward=call, declares=facts)
wrong = Subject(kind="decoder", name="Gemma 2", build=make(GemmaAttentionLateScale), forward=call, declares=facts)
WHAT = "The raw products q k^T are capped and scaled afterwards, instead of being scaled and then capped."
CAUSE = "In the attention 1/sqrt(d_head) stands behind the tanh: scores are capped at soft_cap/sqrt(d_head), not at soft_cap, and saturate far too early."

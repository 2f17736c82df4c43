WHAT = "the soft cap is applied behind the mask, and lifts the hidden scores from the least number to -CAP: future and padding keep a weight: line 46"
"""Gemma 2: capped scores, norms before and after each sublayer, embeddings times sqrt(d), tied."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CAP = 5.0


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1.0 + self.weight)


def apply_rotary_emb(x):
    half = x.shape[-1] // 2
    inv_freq = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * inv_freq
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class GemmaAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        if self.head_dim % 2:
            raise ValueError("head_dim must be even")
        self.qkv_proj = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x, hidden):
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in self.qkv_proj(x).split(sizes, -1))
        q, k = apply_rotary_emb(q) * self.head_dim**-0.5, apply_rotary_emb(k)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3))
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        scores = CAP * torch.tanh(scores / CAP)
        out = torch.matmul(scores.softmax(-1), v)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class GemmaLayer(nn.Module):
    def __init__(self, dim, heads, kv_heads, inner):
        super().__init__()
        self.self_attn = GemmaAttention(dim, heads, kv_heads)
        self.gate_proj, self.up_proj = nn.Linear(dim, inner, bias=False), nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)
        self.input_layernorm, self.post_attention_layernorm = GemmaRMSNorm(dim), GemmaRMSNorm(dim)
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = GemmaRMSNorm(dim), GemmaRMSNorm(dim)

    def mlp(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))

    def forward(self, x, hidden):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), hidden))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma2(nn.Module):
    def __init__(self, vocab, dim, heads, kv_heads, inner, layers):
        super().__init__()
        self.embedder = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(GemmaLayer(dim, heads, kv_heads, inner) for _ in range(layers))
        self.norm = GemmaRMSNorm(dim)

    def forward(self, tokens, attention_mask=None):
        x = self.embedder(tokens)
        x = x * x.shape[-1] ** 0.5
        length = tokens.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=tokens.device).triu(1)
        if attention_mask is not None:
            hidden = hidden | ~attention_mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, hidden)
        return self.norm(x) @ self.embedder.weight.t()


subject = Subject(
    kind="decoder",
    name="Gemma2",
    build=lambda c: Gemma2(c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "soft_cap": CAP,
        "grouped_queries": True,
        "embedding_scale": True,
        "norm": "rms",
        "norm_placement": "other",
        "final_norm": True,
        "activation": "other",
        "bias": False,
        "tied": True,
        "structure": "other",
        "padding_side": "both",
    },
)

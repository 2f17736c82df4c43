"""Gemma 2: scaled and tied embeddings, sandwich norms with gain 1 + w, GeGLU, soft-capped scores."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CAP = 5.0


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def apply_rotary_emb(x, theta=10000.0):
    """x [B, T, H, K], halves."""
    K = x.shape[-1]
    freq = theta ** (-torch.arange(0, K, 2, device=x.device, dtype=torch.float64) / K)
    angle = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None] * freq
    cos, sin = angle.cos().to(x.dtype)[:, None], angle.sin().to(x.dtype)[:, None]
    a, b = x[..., : K // 2], x[..., K // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class GemmaAttention(nn.Module):
    def __init__(self, hidden, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, hidden // heads
        if self.head_dim % 2:
            raise ValueError("head_dim must be even")
        self.scaling = self.head_dim**-0.5
        self.qkv_proj = nn.Linear(hidden, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, x, hidden_keys):
        B, T, _ = x.shape
        xq, xk, xv = self.qkv_proj(x).view(B, T, -1, self.head_dim).split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        xq, xk = apply_rotary_emb(xq), apply_rotary_emb(xk)
        if self.kv_heads != self.heads:
            xk = torch.repeat_interleave(xk, self.heads // self.kv_heads, dim=2)
            xv = torch.repeat_interleave(xv, self.heads // self.kv_heads, dim=2)
        q, k, v = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(q * self.scaling, k.transpose(2, 3))
        scores = CAP * torch.tanh(scores / CAP)
        scores = scores.masked_fill(hidden_keys, torch.finfo(scores.dtype).min)
        return self.o_proj(torch.matmul(scores.softmax(-1), v).transpose(1, 2).reshape(B, T, -1))


class GemmaLayer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, intermediate):
        super().__init__()
        self.self_attn = GemmaAttention(hidden, heads, kv_heads)
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.pre_feedforward_layernorm = RMSNorm(hidden)
        self.post_feedforward_layernorm = RMSNorm(hidden)

    def forward(self, x, hidden_keys):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), hidden_keys))
        h = self.pre_feedforward_layernorm(x)
        h = self.down_proj(F.gelu(self.gate_proj(h), approximate="tanh") * self.up_proj(h))
        return x + self.post_feedforward_layernorm(h)


class Gemma2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.hidden_size = c.d_model
        self.embedder = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            [GemmaLayer(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)]
        )
        self.norm = RMSNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        hidden_keys = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)[None, None]
        if attention_mask is not None:
            hidden_keys = hidden_keys | ~attention_mask[:, None, None, :].bool()
        x = self.embedder(tokens) * self.hidden_size**0.5
        for layer in self.layers:
            x = layer(x, hidden_keys)
        return F.linear(self.norm(x), self.embedder.weight)


subject = Subject(
    kind="decoder",
    name="Gemma 2",
    build=Gemma2,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "soft_cap": CAP, "embedding_scale": True, "tied": True, "positions": "rotary", "layout": "halves",
        "norm": "rms", "norm_placement": "other", "final_norm": True, "activation": "other", "bias": False,
        "output_bias": False, "grouped_queries": True, "padding_side": "right",
    },
)

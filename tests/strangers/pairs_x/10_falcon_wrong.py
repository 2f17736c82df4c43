WHAT = "The second linear map of the MLP has a bias, where Falcon has none (line 53)."
"""Falcon-7B (2023): one key-value head, attention and MLP side by side behind one LayerNorm, no biases in linear maps."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class FalconRotary(nn.Module):
    def __init__(self, head_dim, base=10000.0):
        super().__init__()
        if head_dim % 2:
            raise ValueError("rotary heads have an even width")
        self.head_dim, self.base = head_dim, base

    def forward(self, q, k):
        steps = torch.arange(0, self.head_dim, 2, device=q.device, dtype=torch.float64) / self.head_dim
        angle = torch.outer(torch.arange(q.shape[-2], device=q.device, dtype=torch.float64), self.base**-steps)
        angle = torch.cat((angle, angle), dim=-1)
        cos, sin = angle.cos().to(q.dtype), angle.sin().to(q.dtype)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class FalconAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads, self.head_dim = heads, hidden // heads
        self.rotary = FalconRotary(self.head_dim)
        self.query_key_value = nn.Linear(hidden, hidden + 2 * self.head_dim, bias=False)
        self.dense = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x, allowed):
        B, T, D = x.shape
        fused = self.query_key_value(x).view(B, T, self.heads + 2, self.head_dim).transpose(1, 2)
        q, k, v = fused[:, :-2], fused[:, -2:-1], fused[:, -1:]
        q, k = self.rotary(q, k)
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
        return self.dense((weights @ v).transpose(1, 2).reshape(B, T, D))


class FalconMLP(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, ffn, bias=False)
        self.dense_4h_to_h = nn.Linear(ffn, hidden)

    def forward(self, x):
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class FalconLayer(nn.Module):
    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden, eps=1e-5)
        self.self_attention = FalconAttention(hidden, heads)
        self.mlp = FalconMLP(hidden, ffn)

    def forward(self, x, allowed):
        h = self.input_layernorm(x)
        return x + self.self_attention(h, allowed) + self.mlp(h)


class Falcon(nn.Module):
    def __init__(self, vocab_size, hidden, heads, layers, ffn):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden)
        self.h = nn.ModuleList([FalconLayer(hidden, heads, ffn) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(hidden, eps=1e-5)
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.word_embeddings(tokens)
        for layer in self.h:
            x = layer(x, allowed)
        return self.lm_head(self.ln_f(x))


subject = Subject(
    kind="decoder",
    name="Falcon-7B",
    build=lambda c: Falcon(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "norm": "layer",
        "norm_bias": True,
        "final_norm": True,
        "activation": "gelu",
        "bias": False,
        "tied": True,
        "output_bias": False,
        "padding_side": "both",
    },
)

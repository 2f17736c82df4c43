WHAT = "The rotary frequencies are spread over the width of the head, not over the channels that are rotated (line 32)."
"""GPT-NeoX-20B (Black et al. 2022): parallel residual, rotary positions on a part of every head."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

ROTARY_DIM = 4


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class NeoXAttention(nn.Module):
    def __init__(self, hidden, heads, rotary_ndims, base=10000.0):
        super().__init__()
        if hidden // heads < rotary_ndims:
            raise ValueError("heads are narrower than their rotated part")
        self.heads = heads
        self.head_size = hidden // heads
        self.rotary_ndims = rotary_ndims
        self.base = base
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def rotary(self, length, like):
        steps = torch.arange(0, self.rotary_ndims, 2, device=like.device, dtype=torch.float64)
        inv_freq = self.base ** -(steps / self.head_size)
        t = torch.arange(length, device=like.device, dtype=torch.float64)
        angles = torch.outer(t, inv_freq)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def rotate(self, x, cos, sin):
        rot, rest = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        return torch.cat((rot * cos + rotate_half(rot) * sin, rest), dim=-1)

    def forward(self, x, allowed):
        B, T, D = x.shape
        qkv = self.query_key_value(x).view(B, T, self.heads, 3 * self.head_size).transpose(1, 2)
        q, k, v = qkv.split(self.head_size, dim=-1)
        cos, sin = self.rotary(T, x)
        q, k = self.rotate(q, cos, sin), self.rotate(k, cos, sin)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) / self.head_size**0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)
        return self.dense(out.transpose(1, 2).reshape(B, T, D))


class NeoXLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate, rotary_ndims):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden, eps=1e-5)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=1e-5)
        self.attention = NeoXAttention(hidden, heads, rotary_ndims)
        self.dense_h_to_4h = nn.Linear(hidden, intermediate)
        self.dense_4h_to_h = nn.Linear(intermediate, hidden)

    def forward(self, x, allowed):
        attended = self.attention(self.input_layernorm(x), allowed)
        fed = self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(self.post_attention_layernorm(x))))
        return x + attended + fed


class GPTNeoX(nn.Module):
    def __init__(self, vocab_size, hidden, heads, layers, intermediate):
        super().__init__()
        self.embed_in = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList([NeoXLayer(hidden, heads, intermediate, ROTARY_DIM) for _ in range(layers)])
        self.final_layer_norm = nn.LayerNorm(hidden, eps=1e-5)
        self.embed_out = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None, :]
        x = self.embed_in(tokens)
        for layer in self.layers:
            x = layer(x, allowed)
        return self.embed_out(self.final_layer_norm(x))


subject = Subject(
    kind="decoder",
    name="GPT-NeoX",
    build=lambda c: GPTNeoX(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (32,), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "rotary_dim": ROTARY_DIM,
        "layout": "halves",
        "base": 10000,
        "norm": "layer",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "tied": False,
        "output_bias": False,
        "padding_side": "both",
    },
)

"""RoFormer: an encoder whose queries and keys are rotated, channel 2i with channel 2i + 1."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.dim, self.base = dim, base

    def forward(self, seq_len, like):
        t = torch.arange(seq_len, device=like.device, dtype=torch.float64)
        inv_freq = self.base ** (-torch.arange(0, self.dim, 2, device=like.device, dtype=torch.float64) / self.dim)
        freqs = torch.outer(t, inv_freq)
        emb = torch.repeat_interleave(freqs, 2, dim=-1)
        return emb.cos().to(like.dtype), emb.sin().to(like.dtype)


def rotate_pairs(x):
    # (a, b, c, d, ...) -> (-b, a, -d, c, ...)
    x1, x2 = x[..., ::2], x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def apply_rotary(x, cos, sin):
    return x * cos + rotate_pairs(x) * sin


class RoFormerLayer(nn.Module):
    def __init__(self, dim, heads, ffn, drop):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn)
        self.fc2 = nn.Linear(ffn, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x, rotary, allowed):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        cos, sin = rotary(N, q)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        scores = (q @ k.transpose(-2, -1)) * (C // self.heads) ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        attn = self.drop(scores.softmax(dim=-1).masked_fill(~allowed, 0.0).to(v.dtype))
        out = (attn @ v).transpose(1, 2).reshape(B, N, C)
        x = self.norm1(x + self.drop(self.proj(out)))
        return self.norm2(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class RoFormer(nn.Module):
    def __init__(self, vocab, dim, depth, heads, ffn, drop=0.0):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rotary = RotaryEmbedding(dim // heads)
        self.layers = nn.ModuleList([RoFormerLayer(dim, heads, ffn, drop) for _ in range(depth)])
        self.drop = nn.Dropout(drop)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = tokens.new_ones(tokens.shape, dtype=torch.bool)
        allowed = mask[:, None, None, :]
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x, self.rotary, allowed)
        return x


subject = Subject(
    kind="encoder",
    name="RoFormer",
    build=lambda c: RoFormer(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "rotary",
        "layout": "interleaved",
        "base": 10000,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": False,
        "init": "default",
        "structure": "textbook",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)

"""A text encoder: pre-norm, fused attention, positions of sines and cosines."""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from veriformer.properties import Subject


@dataclass(frozen=True)
class EncoderSpec:
    vocab: int
    width: int
    heads: int
    depth: int
    hidden: int
    dropout: float


def positional_encoding(length: int, width: int, like: Tensor) -> Tensor:
    pos = torch.arange(length, dtype=torch.float64, device=like.device).unsqueeze(1)
    i = torch.arange(0, width, 2, dtype=torch.float64, device=like.device)
    angle = pos / torch.pow(10000.0, i / width)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).reshape(length, width).to(like.dtype)


class SelfAttention(nn.Module):
    def __init__(self, spec: EncoderSpec):
        super().__init__()
        self.heads, self.dropout = spec.heads, spec.dropout
        self.in_proj = nn.Linear(spec.width, 3 * spec.width)
        self.out_proj = nn.Linear(spec.width, spec.width)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, self.heads, w // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if mask is None else mask[:, None, None, :].expand(b, 1, t, t),
            dropout_p=self.dropout,
        )
        return self.out_proj(y.transpose(1, 2).reshape(b, t, w))


class EncoderBlock(nn.Module):
    def __init__(self, spec: EncoderSpec):
        super().__init__()
        self.norm_a, self.norm_b = nn.LayerNorm(spec.width), nn.LayerNorm(spec.width)
        self.attention = SelfAttention(spec)
        self.expand, self.contract = nn.Linear(spec.width, spec.hidden), nn.Linear(spec.hidden, spec.width)
        self.drop = nn.Dropout(spec.dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.drop(self.attention(self.norm_a(x), mask))
        return x + self.drop(self.contract(F.gelu(self.expand(self.norm_b(x)))))


class TextEncoder(nn.Module):
    def __init__(self, spec: EncoderSpec):
        super().__init__()
        self.embedding = nn.Embedding(spec.vocab, spec.width)
        self.drop = nn.Dropout(spec.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(spec) for _ in range(spec.depth))
        self.norm = nn.LayerNorm(spec.width)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        return self.encode(x, mask)

    def encode(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.drop(x + positional_encoding(x.shape[1], x.shape[2], x))
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="text encoder",
    build=lambda c: TextEncoder(EncoderSpec(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    embed=lambda m, embeddings, attention_mask=None: m.encode(embeddings, attention_mask),
    domain={"d_model": (8, 16, 32)},
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000,
        "beyond_max_len": "works",
        "embedding_scale": False,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "padding_side": "right",
        "structure": "textbook",
    },
)

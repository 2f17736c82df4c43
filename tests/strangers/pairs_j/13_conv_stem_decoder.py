"""A byte model: a causal convolution before a stack of blocks."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "the padded convolution is cut at its left end instead of its right end, so that each token sees two later ones"
CAUSE = (
    "The convolution before the layers is not causal: it is padded on both sides and cropped at the wrong end, so that "
    "a position sees two tokens of the future."
)


class ConvStem(nn.Module):
    def __init__(self, dim, width=3):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, width, padding=width - 1)

    def forward(self, x):
        y = self.conv(x.transpose(1, 2))
        return F.silu(y[..., : x.shape[1]]).transpose(1, 2)


class ConvFront(ConvStem):
    def forward(self, x):
        y = self.conv(x.transpose(1, 2))
        return F.silu(y[..., -x.shape[1] :]).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, hidden), nn.SiLU(), nn.Linear(hidden, dim))

    def forward(self, x):
        qkv = self.in_proj(self.norm_a(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.movedim(2, 0).transpose(2, 3)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).flatten(2))
        return x + self.ffn(self.norm_f(x))


class ByteModel(nn.Module):
    def __init__(self, c, stem):
        super().__init__()
        self.bytes = nn.Embedding(c.vocab_size, c.d_model)
        self.stem = stem(c.d_model)
        self.places = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.Sequential(*(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)))
        self.norm = nn.LayerNorm(c.d_model)
        self.logits = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens):
        x = self.stem(self.bytes(tokens)) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.logits(self.norm(self.blocks(x)))


def subject(stem):
    return Subject(
        kind="decoder",
        name="byte model",
        build=lambda c: ByteModel(c, stem),
        forward=lambda model, tokens: model(tokens),
    )


right = subject(ConvStem)
wrong = subject(ConvFront)

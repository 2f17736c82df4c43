"""An encoder that drops padding first (varlen, as ModernBERT does) and scatters its outputs back."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Sequence ids of the packed tokens are bucketised with the wrong side: a sequence's first token joins the one before."
CAUSE = (
    "Samples of a batch leak into one another: in the packed batch the boundaries are off by one, so that the first token "
    "of each sequence attends within the previous sample's segment (and is missing from its own)."
)


def make(side):
    def segments(lengths, total):
        ends = lengths.cumsum(0)
        return torch.bucketize(torch.arange(total, device=lengths.device), ends, right=side)

    class Attention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.Wqkv = nn.Linear(dim, 3 * dim, bias=False)
            self.Wo = nn.Linear(dim, dim, bias=False)

        def forward(self, x, same):
            n, dim = x.shape
            q, k, v = self.Wqkv(x).view(n, 3, self.heads, dim // self.heads).unbind(1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(dim // self.heads)
            scores = scores.masked_fill(~same, -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
            return self.Wo(mixed.reshape(n, dim))

    class Layer(nn.Module):
        def __init__(self, dim, heads, inner):
            super().__init__()
            self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.attn = Attention(dim, heads)
            self.mlp = nn.Sequential(nn.Linear(dim, inner), nn.GELU(), nn.Linear(inner, dim))

        def forward(self, x, same):
            x = x + self.attn(self.attn_norm(x), same)
            return x + self.mlp(self.mlp_norm(x))

    class UnpaddedEncoder(nn.Module):
        def __init__(self, c):
            super().__init__()
            self.tok = nn.Embedding(c.vocab_size, c.d_model)
            self.pos = nn.Embedding(c.max_len, c.d_model)
            self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
            self.final_norm = nn.LayerNorm(c.d_model)

        def forward(self, tokens, attention_mask=None):
            if attention_mask is None:
                attention_mask = torch.ones_like(tokens, dtype=torch.bool)
            attention_mask = attention_mask.bool()
            rows, columns = attention_mask.nonzero(as_tuple=True)
            position = (attention_mask.long().cumsum(1) - 1)[rows, columns]
            x = self.tok(tokens[rows, columns]) + self.pos(position)
            seq = segments(attention_mask.sum(1), x.shape[0])
            same = seq[:, None] == seq[None, :]
            for layer in self.layers:
                x = layer(x, same)
            x = self.final_norm(x)
            out = x.new_zeros(*tokens.shape, x.shape[-1])
            return out.index_put((rows, columns), x)

    return UnpaddedEncoder


def subject(side):
    model = make(side)
    return Subject(
        kind="encoder",
        name="unpadded encoder",
        build=model,
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": False},
    )


right = subject(True)
wrong = subject(False)

WHAT = 'before the maximum over time padded frames are multiplied by zero instead of set to minus infinity: where a channel is negative in all real frames, padding gives 0 in its place (line 43: x = x * keep[..., None])'
"""Audio tagger over codec tokens: transformer encoder, maximum over time, one linear head."""
import math

import torch
from torch import nn, einsum

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(heads, dim, dim // heads) / math.sqrt(dim)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, dim // heads, dim) / math.sqrt(dim))

    def forward(self, x, keep):
        q, k, v = (einsum("btd,hde->bhte", x, w) for w in (self.wq, self.wk, self.wv))
        logits = einsum("bhte,bhse->bhts", q, k) / math.sqrt(q.shape[-1])
        logits = logits.masked_fill(~keep[:, None, None, :], torch.finfo(logits.dtype).min)
        return einsum("bhts,bhse,hed->btd", logits.softmax(-1), v, self.wo)


class Tagger(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len, tags):
        super().__init__()
        self.codes = nn.Embedding(vocab, dim)
        self.time = nn.Parameter(0.1 * torch.randn(max_len, dim))
        self.attn = nn.ModuleList([Attention(dim, heads) for _ in range(depth)])
        self.mlp = nn.ModuleList([nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(dim) for _ in range(2 * depth + 1)])
        self.tags = nn.Linear(dim, tags)

    def forward(self, codes, keep=None):
        if codes.shape[1] > len(self.time):
            raise ValueError("clip too long")
        keep = codes.new_ones(codes.shape).bool() if keep is None else keep
        x = self.codes(codes) + self.time[: codes.shape[1]]
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp)):
            x = x + attn(self.norms[2 * i](x), keep)
            x = x + mlp(self.norms[2 * i + 1](x))
        x = self.norms[-1](x)
        x = x * keep[..., None]
        return self.tags(x.amax(dim=1))


subject = Subject(
    kind="classifier",
    name="audio tagger",
    build=lambda c: Tagger(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "max", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "gelu", "padding_side": "right"},
)

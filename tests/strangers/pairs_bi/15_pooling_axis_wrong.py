WHAT = "The softmax of the pooling runs over the last axis of [B, T, 1], which has one entry: every weight is 1, padding's too, so the pooling is a plain sum over all positions and its scores are never trained (line 33: dim=-1 for dim=1)."
import math

import torch
from torch import nn

from veriformer.properties import Subject


class SelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, bias):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.h, D // self.h).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = (q @ k.transpose(-1, -2) / math.sqrt(D // self.h) + bias).softmax(-1)
        return self.o((a @ v).transpose(1, 2).reshape(B, T, D))


class AttentionPooling(nn.Module):
    """A score a token, softmax over the tokens, weighted sum."""

    def __init__(self, d):
        super().__init__()
        self.score = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, 1))

    def forward(self, x, mask):
        scores = self.score(x)  # [B, T, 1]
        scores = scores.masked_fill(~mask.unsqueeze(-1), torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        return (weights * x).sum(dim=1)


class ReviewClassifier(nn.Module):
    def __init__(self, vocab, d, h, layers, d_ff, max_len, classes):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.attn = nn.ModuleList([SelfAttention(d, h) for _ in range(layers)])
        self.ff = nn.ModuleList([nn.Sequential(nn.Linear(d, d_ff), nn.ReLU(), nn.Linear(d_ff, d)) for _ in range(layers)])
        self.n1 = nn.ModuleList([nn.LayerNorm(d) for _ in range(layers)])
        self.n2 = nn.ModuleList([nn.LayerNorm(d) for _ in range(layers)])
        self.pool, self.head = AttentionPooling(d), nn.Linear(d, classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.emb(tokens) + self.pos.weight[: tokens.shape[1]]
        bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device)
        bias = bias.masked_fill(~mask, torch.finfo(x.dtype).min)[:, None, None]
        for attn, ff, n1, n2 in zip(self.attn, self.ff, self.n1, self.n2):
            x = n1(x + attn(x, bias))
            x = n2(x + ff(x))
        return self.head(self.pool(x, mask))


subject = Subject(
    kind="classifier",
    name="classifier with attention pooling",
    build=lambda c: ReviewClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "weighted",
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)

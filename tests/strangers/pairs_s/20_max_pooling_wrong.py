WHAT = "line 39: padded positions are set to zero and not to minus infinity before the maximum over the sequence, so with padding no pooled channel can be below zero"
"""A sentence classifier: a post-norm encoder as in BERT, and the maximum over real tokens."""

import torch
from torch import nn

from veriformer.properties import Subject


class SentenceClassifier(nn.Module):
    def __init__(self, vocab, width, heads, inner, layers, length, classes):
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.embedding_norm = nn.LayerNorm(width)
        self.q = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.k = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.v = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.o = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.inner = nn.ModuleList([nn.Linear(width, inner) for _ in range(layers)])
        self.outer = nn.ModuleList([nn.Linear(inner, width) for _ in range(layers)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * layers)])
        self.classify = nn.Linear(width, classes)
        self.heads = heads

    def attention(self, n, x, mask):
        batch, length, width = x.shape
        q, k, v = (m[n](x).view(batch, length, self.heads, -1).permute(0, 2, 1, 3) for m in (self.q, self.k, self.v))
        scores = q.matmul(k.transpose(2, 3)) / (width // self.heads) ** 0.5
        scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
        return self.o[n](scores.softmax(-1).matmul(v).permute(0, 2, 1, 3).reshape(batch, length, width))

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embedding_norm(self.words(tokens) + self.places.weight[: tokens.shape[1]])
        for n in range(len(self.q)):
            x = self.norms[2 * n](x + self.attention(n, x, mask))
            x = self.norms[2 * n + 1](x + self.outer[n](nn.functional.gelu(self.inner[n](x))))
        pooled = x.masked_fill(~mask[..., None], 0.0).amax(dim=1)
        return self.classify(pooled)


subject = Subject(
    kind="classifier",
    name="sentence classifier",
    build=lambda c: SentenceClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.num_classes
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "pooling": "max",
        "padding_side": "right",
        "positions": "learned",
        "norm_placement": "post",
        "norm": "layer",
        "activation": "gelu",
    },
)

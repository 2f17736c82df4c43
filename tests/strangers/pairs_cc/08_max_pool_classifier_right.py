import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def attend(q, k, v, ok):
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~ok, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1).masked_fill(~ok, 0.0) @ v


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, inner, dropout):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.ffn = nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x, ok):
        h = self.ln1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.drop(self.o(attend(q, k, v, ok).transpose(1, 2).flatten(2)))
        return x + self.drop(self.ffn(self.ln2(x)))


class SentenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers))
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens)
        mask = attention_mask.bool()
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask[:, None, None, :])
        x = self.ln_f(x)
        pooled = x.masked_fill(~mask[..., None], torch.finfo(x.dtype).min).amax(dim=1)
        return self.head(pooled)


subject = Subject(
    kind="classifier",
    name="classifier with max pooling",
    build=SentenceClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "pooling": "max", "norm": "layer", "norm_placement": "pre",
              "final_norm": True, "activation": "relu", "bias": True, "output_bias": True, "padding_side": "right"},
)

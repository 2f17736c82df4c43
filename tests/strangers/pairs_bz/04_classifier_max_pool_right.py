"""Text classifier: post-LN encoder of torch.nn, sinusoidal positions, max pooling over time."""
import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def sinusoids(length, dim):
    position = torch.arange(length).unsqueeze(1).float()
    rate = torch.exp(torch.arange(0, dim, 2).float() * (-math.log(10000.0) / dim))
    table = torch.zeros(length, dim)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : dim // 2]
    return table


class TextClassifier(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, classes, max_len, dropout):
        super().__init__()
        self.dim = dim
        self.embedding = nn.Embedding(vocab, dim)
        self.register_buffer("pe", sinusoids(max_len, dim))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, hidden, dropout, batch_first=True) for _ in range(layers)
        )
        self.fc = nn.Linear(dim, classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embedding(tokens) * math.sqrt(self.dim) + self.pe[: tokens.size(1)]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~mask)
        x = x.masked_fill(~mask.unsqueeze(-1), float("-inf"))
        return self.fc(x.max(dim=1).values)


subject = Subject(
    kind="classifier",
    name="max pooling",
    build=lambda c: TextClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"positions": "sinusoidal", "embedding_scale": True, "norm_placement": "post", "activation": "relu",
              "pooling": "max", "padding_side": "right"},
)

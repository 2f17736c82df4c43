"""Sentence classifier: a learned class token in front, torch's own layers behind."""

import torch
from torch import nn
from torch.nn import functional

from veriformer.properties import Subject


class SentenceClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.cls = nn.Parameter(torch.randn(1, 1, c.d_model))
        self.position = nn.Parameter(torch.randn(1, c.max_len + 1, c.d_model) * 0.5)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                c.d_model, c.num_heads, c.d_ff, dropout=c.dropout, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(c.num_layers)
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1)
        x = x + self.position[:, : x.shape[1]]
        padding = None
        if attention_mask is not None:
            # the class token is always there
            padding = ~functional.pad(attention_mask, (1, 0), value=True)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(self.norm(x[:, 0]))


subject = Subject(
    kind="classifier",
    name="sentence classifier",
    build=SentenceClassifier,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "pooling": "cls",
        "extra_tokens": 1,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)

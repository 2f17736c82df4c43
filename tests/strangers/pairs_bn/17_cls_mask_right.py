"""Sentence classifier on a class token, made of torch's layers."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SentenceClassifier(nn.Module):
    def __init__(self, vocab_size, d_model, nhead, num_layers, d_ff, max_len, num_classes):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.cls = nn.Parameter(torch.randn(1, 1, d_model))
        self.pos = nn.Parameter(torch.randn(1, max_len + 1, d_model))
        layer = nn.TransformerEncoderLayer(
            d_model, nhead, d_ff, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(
            layer, num_layers, norm=nn.LayerNorm(d_model), enable_nested_tensor=False
        )
        self.fc = nn.Linear(d_model, num_classes)

    def forward(self, tokens, attention_mask=None):
        x = self.embedding(tokens)
        x = torch.cat([self.cls.expand(x.size(0), -1, -1), x], dim=1)
        x = x + self.pos[:, : x.size(1)]
        padding = None
        if attention_mask is not None:
            # the class token is always there
            padding = ~F.pad(attention_mask, (1, 0), value=True)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.fc(x[:, 0])


subject = Subject(
    kind="classifier",
    name="class-token classifier",
    build=lambda c: SentenceClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "cls",
        "extra_tokens": 1,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)

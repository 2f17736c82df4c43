WHAT = "Padding is set to 0 instead of -inf before the maximum, so that 0 wins in every channel whose real states are all negative: outputs depend on whether there is padding (line 26)."
"""Sentence classifier: torch.nn's encoder, the maximum over real tokens, a linear head."""

import torch
from torch import nn

from veriformer.properties import Subject


class SentenceClassifier(nn.Module):
    def __init__(self, *, vocab, width, heads, layers, hidden, max_len, classes):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.places = nn.Parameter(torch.randn(max_len, width) * 0.1)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens, real=None):
        if real is None:
            real = torch.ones_like(tokens, dtype=torch.bool)
        states = self.words(tokens) + self.places[: tokens.size(1)]
        for layer in self.encoder:
            states = layer(states, src_key_padding_mask=~real)
        states = states * real.unsqueeze(-1)
        pooled = states.max(dim=1).values
        return self.classify(pooled)


subject = Subject(
    kind="classifier",
    name="max-pooling classifier",
    build=lambda c: SentenceClassifier(
        vocab=c.vocab_size,
        width=c.d_model,
        heads=c.num_heads,
        layers=c.num_layers,
        hidden=c.d_ff,
        max_len=c.max_len,
        classes=c.num_classes,
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "pooling": "max",
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "bias": True,
        "output_bias": True,
    },
)

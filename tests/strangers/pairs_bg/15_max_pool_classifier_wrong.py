WHAT = "Padding is multiplied by 0 before the maximum (line 13): wherever all real tokens are negative in a channel, the padding's 0 wins."
"""Keyword classifier: a Keras-like encoder and GlobalMaxPooling1D over the real tokens."""

import torch
from torch import nn

from veriformer.properties import Subject


class MaskedGlobalMaxPooling1D(nn.Module):
    def forward(self, inputs, mask=None):
        if mask is not None:
            inputs = inputs * mask.unsqueeze(-1).to(inputs.dtype)
        return inputs.amax(dim=1)


class Classifier(nn.Module):
    def __init__(self, vocab_size, d_model, heads, layers, d_ff, max_len, classes):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Parameter(torch.randn(max_len, d_model) * 0.1)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, heads, d_ff, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.pool = MaskedGlobalMaxPooling1D()
        self.logits = nn.Linear(d_model, classes)

    def forward(self, tokens, mask=None):
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=None if mask is None else ~mask)
        return self.logits(self.pool(x, mask))


subject = Subject(
    kind="classifier",
    name="max-pooling classifier",
    build=lambda c: Classifier(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "pooling": "max",
        "positions": "learned",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
        "output_bias": True,
    },
)

"""Sentence classifier: torch's encoder layers, the maximum over the words of each feature."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 512):
        super().__init__()
        position = torch.arange(max_len, dtype=torch.float64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10000.0) / d_model))
        pe = torch.zeros(1, max_len, d_model, dtype=torch.float64)
        pe[0, :, 0::2] = torch.sin(position * div_term)
        pe[0, :, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.to(torch.get_default_dtype()))

    def forward(self, x):
        if x.size(1) > self.pe.size(1):
            raise ValueError(f"at most {self.pe.size(1)} words")
        return x + self.pe[:, : x.size(1)]


class MaxPoolClassifier(nn.Module):
    def __init__(self, ntoken: int, d_model: int, nhead: int, d_hid: int, nlayers: int, nclass: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(ntoken, d_model)
        self.pos_encoder = PositionalEncoding(d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(d_model, nhead, d_hid, dropout, batch_first=True) for _ in range(nlayers)
        )
        self.d_model = d_model
        self.fc = nn.Linear(d_model, nclass)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        # a sentence without words is read as it stands
        attention_mask = attention_mask | ~attention_mask.any(dim=1, keepdim=True)
        x = self.pos_encoder(self.embedding(tokens) * math.sqrt(self.d_model))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~attention_mask)
        x = x * attention_mask.unsqueeze(-1)
        return self.fc(x.amax(dim=1))


subject = Subject(
    kind="classifier",
    name="max pool",
    build=lambda c: MaxPoolClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.num_classes, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": (8, 16, 32)},
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000,
        "max_len": 512,
        "beyond_max_len": "error",
        "embedding_scale": True,
        "pooling": "max",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "padding_side": "right",
        "structure": "textbook",
    },
)

"""A sentence classifier: sinusoids, torch.nn post-LN encoder, masked mean pooling."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb, self.drop = nn.Embedding(c.vocab_size, c.d_model), nn.Dropout(c.dropout)
        self.enc = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout, batch_first=True) for _ in range(c.num_layers))
        self.fc = nn.Linear(c.d_model, c.num_classes)

    def encode_positions(self, x):
        d = x.shape[-1]
        p = torch.arange(x.shape[1], device=x.device, dtype=x.dtype).unsqueeze(1)
        div = torch.exp(torch.arange(0, d, 2, device=x.device, dtype=x.dtype) * (-math.log(10000.0) / d))
        pe = x.new_zeros(x.shape[1], d)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(p * div), torch.cos(p * div)
        return x + pe

    def forward(self, t, mask=None):
        mask = torch.ones_like(t, dtype=torch.bool) if mask is None else mask
        x = self.drop(self.encode_positions(self.emb(t)))
        for layer in self.enc:
            x = layer(x, src_key_padding_mask=~mask)
        x = x.masked_fill(~mask[..., None], 0.0)
        return self.fc(x.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))

common = dict(kind="classifier", build=Classifier, domain={"d_model": [8, 16, 24], "num_heads": [1, 2, 4]}, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"positions": "sinusoidal", "pooling": "mean", "norm": "layer", "norm_placement": "post", "activation": "relu",
    "padding_side": "right"})

WHAT = 'before the maximum over time padded frames are filled with 0, not with the lowest number (`masked_fill(..., 0.0)`), so a channel whose real frames are all negative pools to 0'
import math

import torch
from torch import nn

from veriformer.properties import Subject


def sinusoids(length, channels, device):
    rate = torch.exp(-math.log(10000.0) * torch.arange(0, channels, 2, device=device, dtype=torch.float64) / channels)
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :channels]


class KeywordSpotter(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        layer = nn.TransformerEncoderLayer(
            c.d_model, c.num_heads, c.d_ff, dropout=c.dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, c.num_layers, nn.LayerNorm(c.d_model), enable_nested_tensor=False)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, codes, lengths_mask=None):
        x = self.embed(codes)
        x = x + sinusoids(x.size(1), x.size(2), x.device).to(x.dtype)
        drop = None if lengths_mask is None else ~lengths_mask
        x = self.encoder(x, src_key_padding_mask=drop)
        if drop is not None:
            x = x.masked_fill(drop.unsqueeze(-1), 0.0)
        return self.head(x.amax(dim=1))


subject = Subject(
    kind="classifier",
    name="keyword spotter",
    build=KeywordSpotter,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "sinusoidal", "layout": "interleaved", "norm_placement": "pre", "norm": "layer",
        "final_norm": True, "activation": "gelu", "pooling": "max", "padding_side": "right",
    },
)

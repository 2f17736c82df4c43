WHAT = 'the scaled lookup goes through F.embedding without padding_idx, so the padding row, zero at the start, gets gradients and is trained (line 33)'
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

PAD = 0


def sinusoids(length, dim):
    pos = torch.arange(length, dtype=torch.float64)[:, None]
    div = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64) * (-math.log(10000.0) / dim))
    table = torch.zeros(length, dim, dtype=torch.float64)
    table[:, 0::2] = torch.sin(pos * div)
    table[:, 1::2] = torch.cos(pos * div)[:, : dim // 2]
    return table


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model, padding_idx=PAD)
        self.scale = math.sqrt(c.d_model)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, dropout=c.dropout, batch_first=True)
            for _ in range(c.num_layers)
        )

    def lookup(self, tokens):
        return F.embedding(tokens, self.embed.weight) * self.scale

    def forward(self, tokens, attention_mask=None):
        x = self.lookup(tokens)
        x = x + sinusoids(x.shape[1], x.shape[2]).to(x)
        hidden = None if attention_mask is None else ~attention_mask
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=hidden)
        return x


subject = Subject(
    kind="encoder",
    build=Encoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "sinusoidal", "layout": "interleaved", "padding_idx": PAD, "embedding_scale": True,
        "norm_placement": "post", "norm": "layer", "activation": "relu", "causal": False,
    },
)

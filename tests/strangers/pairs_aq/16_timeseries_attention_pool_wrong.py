WHAT = 'the pooling query is used through .data, which cuts it from the graph: the parameter asks for a gradient, but never gets one and stays as it was initialised (line 25: query = self.query.data)'
"""Classifier of quantised time series: encoder with sinusoidal time, learned attention pooling."""
import torch
from torch import nn

from veriformer.properties import Subject


def time_table(length, dim, device, dtype):
    half = torch.arange(0, dim, 2, device=device, dtype=dtype)
    angle = torch.arange(length, device=device, dtype=dtype).unsqueeze(1) / 10000.0 ** (half / dim)
    table = torch.zeros(length, dim, device=device, dtype=dtype)
    table[:, 0::2] = torch.sin(angle)
    table[:, 1::2] = torch.cos(angle)[:, : dim // 2]
    return table


class AttentionPool(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Parameter(torch.randn(dim))
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, h, valid):
        query = self.query.data
        score = torch.einsum("btd,d->bt", self.key(h), query) / h.shape[-1] ** 0.5
        weight = score.masked_fill(~valid, torch.finfo(score.dtype).min).softmax(dim=1)
        return torch.einsum("bt,btd->bd", weight, h)


class SeriesClassifier(nn.Module):
    def __init__(self, levels, dim, heads, layers, ff, classes):
        super().__init__()
        self.levels = nn.Embedding(levels, dim)
        self.encoder = nn.ModuleList(
            [nn.TransformerEncoderLayer(dim, heads, ff, 0.0, nn.functional.gelu, batch_first=True) for _ in range(layers)]
        )
        self.pool, self.fc = AttentionPool(dim), nn.Linear(dim, classes)

    def forward(self, series, valid=None):
        if valid is None:
            valid = torch.ones(series.shape, dtype=torch.bool, device=series.device)
        h = self.levels(series)
        h = h + time_table(h.shape[1], h.shape[2], h.device, h.dtype)
        for layer in self.encoder:
            h = layer(h, src_key_padding_mask=~valid)
        return self.fc(self.pool(h, valid))


subject = Subject(
    kind="classifier",
    name="series classifier",
    build=lambda c: SeriesClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "sinusoidal", "layout": "interleaved", "pooling": "weighted", "norm": "layer",
              "norm_placement": "post", "activation": "gelu", "padding_side": "right"},
)

WHAT = "RevIN.statistics takes mean and variance over all time steps, padding included (`mean = x.mean(1)`, `var = x.var(1)`); the mask reaches attention alone"
"""Encoder for multivariate series with reversible instance normalisation (RevIN, Kim et al. 2022, without its affine)."""
import torch
from torch import nn
from torch.nn.functional import relu, scaled_dot_product_attention

from veriformer.properties import Subject


class RevIN(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps

    def statistics(self, x, observed):
        mean = x.mean(1, keepdim=True)
        var = x.var(1, keepdim=True, unbiased=False)
        return mean, (var + self.eps).sqrt()

    def forward(self, x, mean, std):
        return (x - mean) / std

    def inverse(self, x, mean, std):
        return x * std + mean


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, observed):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        a = scaled_dot_product_attention(q, k, v, attn_mask=observed[:, None, None, :])
        x = x + self.o(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(relu(self.up(self.n2(x))))


class SeriesEncoder(nn.Module):
    def __init__(self, d, h, layers, ff):
        super().__init__()
        self.revin = RevIN()
        self.layers = nn.ModuleList([Layer(d, h, ff) for _ in range(layers)])

    def forward(self, series, observed=None):
        if observed is None:
            observed = torch.ones(series.shape[:2], dtype=torch.bool, device=series.device)
        mean, std = self.revin.statistics(series, observed)
        x = self.revin(series, mean, std)
        for layer in self.layers:
            x = layer(x, observed)
        return self.revin.inverse(x, mean, std)


subject = Subject(
    kind="encoder",
    name="series encoder",
    inputs="embeddings",
    build=lambda c: SeriesEncoder(c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "positions": "none", "norm_placement": "pre", "activation": "relu", "final_norm": False},
)

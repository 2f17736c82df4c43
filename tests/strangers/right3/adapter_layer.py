"""A post-LN encoder layer with a Houlsby bottleneck adapter after each sublayer."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

class Adapter(nn.Module):
    def __init__(self, d, r=4):
        super().__init__()
        self.down, self.up = nn.Linear(d, r), nn.Linear(r, d)
    def forward(self, x):
        return x + self.up(F.gelu(self.down(x)))

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.att = nn.MultiheadAttention(c.d_model, c.num_heads, c.dropout, batch_first=True)
        self.fc1, self.fc2, self.drop = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model), nn.Dropout(c.dropout)
        self.ad1, self.ad2 = Adapter(c.d_model), Adapter(c.d_model)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
    def forward(self, x, mask=None):
        pad = None if mask is None else torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, torch.finfo(x.dtype).min)
        a = self.att(x, x, x, key_padding_mask=pad, need_weights=False)[0]
        x = self.n1(x + self.ad1(self.drop(a)))
        return self.n2(x + self.ad2(self.drop(self.fc2(F.gelu(self.fc1(x))))))

common = dict(kind="layer", build=Layer, mask_forms=("padding",), forward=lambda m, x, attention_mask=None: m(x, attention_mask))
undeclared = Subject(**common)
declared = Subject(**common, declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "post", "activation": "gelu", "residual": True,
    "structure": "other"})

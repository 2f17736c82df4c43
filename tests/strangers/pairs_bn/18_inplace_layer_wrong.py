WHAT = "without gradients the first residual sum is written into the tensor that the caller passed (x.add_(attention)) instead of into a fresh one: the layer's input is overwritten by its output, and calling it again with the same tensor gives something else (line 27)"
"""Pre-norm layer; without gradients the residual sums are made in place to save memory."""

import torch
from torch import nn

from veriformer.properties import Subject


class ServingLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = nn.MultiheadAttention(d_model, num_heads, batch_first=True)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))

    def attend(self, x, attention_mask):
        h = self.norm1(x)
        hidden = None if attention_mask is None else ~attention_mask
        return self.attn(h, h, h, key_padding_mask=hidden, need_weights=False)[0]

    def forward(self, x, attention_mask=None):
        if torch.is_grad_enabled():
            x = x + self.attend(x, attention_mask)
            return x + self.mlp(self.norm2(x))
        x.add_(self.attend(x, attention_mask))
        x.add_(self.mlp(self.norm2(x)))
        return x


subject = Subject(
    kind="layer",
    name="serving layer",
    build=lambda c: ServingLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
        "bias": True,
    },
)

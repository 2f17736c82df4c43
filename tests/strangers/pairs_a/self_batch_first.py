import torch
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'nn.MultiheadAttention is built without batch_first=True but fed [B, T, D], so it attends across the '
    'samples of the batch at each position instead of across time.'
)
PLACE = 'axis order of the wrapped nn.MultiheadAttention'


class Wrapped(nn.Module):
    def __init__(self, d, h, p):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, h, dropout=p, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


class Wrapped2(nn.Module):
    def __init__(self, d, h, p):
        super().__init__()
        self.attn = nn.MultiheadAttention(d, h, dropout=p)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


right = Subject(
    kind="self_attention",
    build=lambda c: Wrapped(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x: m(x),
    declares={"causal": False, "positions": "none", "bias": True},
    mask_forms=(),
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: Wrapped2(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x: m(x),
    declares={"causal": False, "positions": "none", "bias": True},
    mask_forms=(),
)

"""One encoder layer as in "Attention is all you need" (post-LN)."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class MultiHead(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        B, T, D = x.shape
        return x.view(B, T, self.heads, D // self.heads).transpose(1, 2)

    def forward(self, x, mask=None):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        out = torch.softmax(scores, dim=-1) @ v
        return self.wo(out.transpose(1, 2).reshape(x.shape))


class EncoderLayer(nn.Module):
    def __init__(self, d, heads, d_ff, p):
        super().__init__()
        self.attention = MultiHead(d, heads)
        self.ff = nn.Sequential(nn.Linear(d, d_ff), nn.ReLU(), nn.Linear(d_ff, d))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.drop = nn.Dropout(p)

    def forward(self, x, mask=None):
        h = self.norm1(x + self.drop(self.attention(x, mask)))
        return self.norm2(h + self.drop(self.ff(h)))


subject = Subject(
    kind="layer",
    name="post-LN layer",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": False, "norm": "layer", "norm_placement": "post", "residual": True, "activation": "relu"},
)

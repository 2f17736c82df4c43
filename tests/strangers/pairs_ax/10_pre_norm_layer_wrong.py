WHAT = "the norm centres its input in place (line 20), and its input is the residual stream: the mean over channels is taken from the skip path too, before either sublayer."
"""A pre-LN encoder layer with everything written out."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class LayerNorm(nn.Module):
    def __init__(self, features, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        x -= x.mean(dim=-1, keepdim=True)
        variance = x.pow(2).mean(dim=-1, keepdim=True)
        return self.gain * (x * torch.rsqrt(variance + self.eps)) + self.shift


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)
        self.to_out = nn.Linear(width, width)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = (f(x).reshape(b, t, self.heads, -1).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.norm_1 = LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm_2 = LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x, mask=None):
        stream = x.clone()
        stream = stream + self.attention(self.norm_1(stream), mask)
        stream = stream + self.mlp(self.norm_2(stream))
        return stream


subject = Subject(
    kind="layer",
    name="pre-LN layer",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu",
    },
)

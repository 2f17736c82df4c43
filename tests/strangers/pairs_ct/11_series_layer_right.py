"""A layer of a patch forecaster (time series)."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ForecastLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff, p):
        super().__init__()
        self.n_heads, self.d_k, self.p = n_heads, d_model // n_heads, p
        self.W_Q = nn.Linear(d_model, d_model)
        self.W_K = nn.Linear(d_model, d_model)
        self.W_V = nn.Linear(d_model, d_model)
        self.W_O = nn.Linear(d_model, d_model)
        self.norm_attn = nn.LayerNorm(d_model)
        self.norm_ffn = nn.LayerNorm(d_model)
        self.ff1 = nn.Linear(d_model, d_ff)
        self.ff2 = nn.Linear(d_ff, d_model)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.n_heads, self.d_k).transpose(1, 2)

    def attention(self, x, mask):
        Q, K, V = self.split(self.W_Q(x)), self.split(self.W_K(x)), self.split(self.W_V(x))
        scores = torch.matmul(Q, K.transpose(2, 3)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        attn = F.dropout(scores.softmax(dim=-1), self.p, self.training)
        out = torch.matmul(attn, V).transpose(1, 2).contiguous().view(x.shape)
        return self.W_O(out)

    def forward(self, x, mask=None):
        x = x + F.dropout(self.attention(self.norm_attn(x), mask), self.p, self.training)
        hidden = F.dropout(F.relu(self.ff1(self.norm_ffn(x))), self.p, self.training)
        return x + F.dropout(self.ff2(hidden), self.p, self.training)


subject = Subject(
    kind="layer",
    name="forecast layer",
    build=lambda c: ForecastLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "norm": "layer", "norm_placement": "pre", "activation": "relu"},
)

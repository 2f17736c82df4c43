WHAT = 'stochastic depth of the feed-forward branch is applied to the sum on line 44, so that in training the residual stream of a dropped sample becomes zero (and is divided by the share kept otherwise)'
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = float(rate)

    def forward(self, x):
        if not self.training or self.rate == 0.0:
            return x
        keep = 1.0 - self.rate
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        return x * x.new_empty(shape).bernoulli_(keep).div_(keep)


class Layer(nn.Module):
    def __init__(self, width, heads, inner, drop_path):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)
        self.drop_path = DropPath(drop_path)

    def attention(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask.bool()[:, None, None, :], torch.finfo(scores.dtype).min)
        y = torch.einsum("bhts,bhsk->bthk", scores.softmax(-1), v)
        return self.proj(y.flatten(2))

    def forward(self, x, attention_mask=None):
        x = x + self.drop_path(self.attention(self.norm1(x), attention_mask))
        branch = self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.drop_path(x + branch)


subject = Subject(
    kind="layer",
    name="layer with stochastic depth",
    build=lambda c: Layer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True,
              "activation": "gelu", "bias": True, "drop_path_scaled": True},
)

WHAT = 'stochastic depth is applied to the stream with the branch (`drop_path(x + branch)`) in the second sublayer, so a dropped sample loses its residual and becomes zero'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def drop_path(x, rate: float, training: bool):
    if rate == 0.0 or not training:
        return x
    keep = 1.0 - rate
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
    return x * mask / keep


class SwinlessBlock(nn.Module):
    def __init__(self, dim, heads, hidden, rate):
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def attn(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))

    def mlp(self, x):
        return self.fc2(F.gelu(self.fc1(x)))

    def forward(self, x):
        x = x + drop_path(self.attn(self.norm1(x)), self.rate, self.training)
        x = drop_path(x + self.mlp(self.norm2(x)), self.rate, self.training)
        return x


subject = Subject(
    kind="layer",
    name="vision block with stochastic depth",
    build=lambda c: SwinlessBlock(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "gelu",
              "bias": True, "residual": True, "drop_path_scaled": True},
)

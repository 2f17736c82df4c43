WHAT = 'operation at the wrong place: the second stochastic depth drops (and rescales) the sum with the residual stream, not the branch, so in training whole samples become zero (line 58: x = self.drop_path2(x + self.ls2(self.mlp(self.norm2(x)))))'
"""The trunk of DeiT III: LayerScale on both branches and stochastic depth whose rate grows with the depth."""
import torch
from torch import nn

from veriformer.properties import Subject


def drop_path(x, drop_prob: float = 0.0, training: bool = False):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    return x * random_tensor.div(keep_prob)


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class LayerScale(nn.Module):
    def __init__(self, dim, init_values=0.5):
        super().__init__()
        self.gamma = nn.Parameter(init_values * torch.ones(dim))

    def forward(self, x):
        return x * self.gamma


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.inner = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Mlp(nn.Sequential):
    def __init__(self, dim, hidden):
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class LayerScaleBlock(nn.Module):
    def __init__(self, dim, heads, hidden, rate):
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = nn.LayerNorm(dim), SelfAttention(dim, heads), LayerScale(dim), DropPath(rate)
        self.norm2, self.mlp, self.ls2, self.drop_path2 = nn.LayerNorm(dim), Mlp(dim, hidden), LayerScale(dim), DropPath(rate)

    def forward(self, x):
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        x = self.drop_path2(x + self.ls2(self.mlp(self.norm2(x))))
        return x


class DeiTTrunk(nn.Module):
    def __init__(self, dim, heads, depth, hidden, drop_path_rate):
        super().__init__()
        rates = [drop_path_rate * (i + 1) / depth for i in range(depth)]
        self.blocks = nn.ModuleList([LayerScaleBlock(dim, heads, hidden, rate) for rate in rates])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


subject = Subject(
    kind="layer",
    name="DeiT III trunk",
    build=lambda c: DeiTTrunk(c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={
        "causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "final_norm": False,
        "activation": "gelu", "residual": True, "bias": True, "structure": "other",
    },
)

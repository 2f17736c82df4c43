"""Pre-LN block with stochastic depth on both branches, ported from a Keras ablation (Huang et al. 2016)."""
import torch
from torch import nn

from veriformer.properties import Subject


class StochasticDepth(nn.Module):
    """Drops the whole branch of a sample with probability `rate`."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, branch):
        if not self.training or self.rate == 0.0:
            return branch
        survival = 1.0 - self.rate
        coin = torch.rand((branch.shape[0],) + (1,) * (branch.ndim - 1), device=branch.device, dtype=branch.dtype)
        gate = torch.floor(coin + self.rate)
        return branch * gate / survival


class Attention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(d_model, 3 * d_model)
        self.to_out = nn.Linear(d_model, d_model)

    def forward(self, x, keep):
        batch, length, width = x.shape
        q, k, v = self.to_qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / (width // self.heads) ** 0.5
        if keep is None:
            p = logits.softmax(-1)
        else:
            keep = keep[:, None, None, :]
            p = logits.masked_fill(~keep, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~keep, 0.0)
        return self.to_out((p @ v).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm_a, self.norm_f = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention = Attention(c.d_model, c.num_heads)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.drop_path = StochasticDepth(c.dropout)

    def forward(self, x, attention_mask=None):
        keep = None if attention_mask is None else attention_mask.bool()
        x = x + self.drop_path(self.attention(self.norm_a(x), keep))
        return x + self.drop_path(self.mlp(self.norm_f(x)))


subject = Subject(
    kind="layer",
    build=Block,
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False, "positions": "none", "norm_placement": "pre", "activation": "gelu", "stacked": False,
        "drop_path_scaled": True,
    },
)

WHAT = 'floor(coin + rate) is one with probability rate, not 1 - rate: branches survive as often as they should be dropped, and are still divided by 1 - rate, so the mean of a branch in training is rate / (1 - rate) of what it is in eval mode (line 20).'

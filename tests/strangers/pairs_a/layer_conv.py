import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The depthwise convolution over time in the feed-forward sublayer runs over padded positions without '
    'zeroing them, so what stands in the padding next to a real token changes its output although a mask '
    'is given.'
)
PLACE = 'convolution in the feed-forward sublayer, padding mask'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


class SelfAttention(nn.Module):
    def __init__(self, d, h, p=0.0):
        super().__init__()
        self.h, self.p = h, p
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, allowed=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.out(attend(q, k, v, allowed, self.p, self.training).transpose(1, 2).flatten(2))


class ConvLayer(nn.Module):
    """Local order enters by a depthwise convolution of width 3 in the feed-forward sublayer."""

    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.conv = nn.Conv1d(f, f, 3, padding=1, groups=f)
        self.drop = nn.Dropout(p)

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        x = x + self.drop(self.attn(self.norm1(x), allowed))
        h = self.up(self.norm2(x))
        if attention_mask is not None:
            h = h.masked_fill(~attention_mask[..., None], 0.0)
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        return x + self.drop(self.down(F.gelu(h)))


class ConvLayer2(nn.Module):
    """Local order enters by a depthwise convolution of width 3 in the feed-forward sublayer."""

    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.conv = nn.Conv1d(f, f, 3, padding=1, groups=f)
        self.drop = nn.Dropout(p)

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        x = x + self.drop(self.attn(self.norm1(x), allowed))
        h = self.up(self.norm2(x))
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        return x + self.drop(self.down(F.gelu(h)))


right = Subject(
    kind="layer",
    build=lambda c: ConvLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "other", "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "gelu", "structure": "other"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="layer",
    build=lambda c: ConvLayer2(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "other", "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "gelu", "structure": "other"},
    mask_forms=("padding",),
)

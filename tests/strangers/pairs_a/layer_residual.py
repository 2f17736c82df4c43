import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'In the pre-LN layer the residual of the attention sublayer is taken from the normalised input (h + '
    "attn(h)) instead of the input itself, so the skip path passes through the LayerNorm and the input's "
    'size and mean are lost.'
)
PLACE = 'residual connection around the attention sublayer of a pre-LN layer'


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


class PreNormLayer(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.ff = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))
        self.drop = nn.Dropout(p)

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        x = x + self.drop(self.attn(self.norm1(x), allowed))
        return x + self.drop(self.ff(self.norm2(x)))


class PreNormLayer2(nn.Module):
    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.ff = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Linear(f, d))
        self.drop = nn.Dropout(p)

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        x = self.norm1(x)
        x = x + self.drop(self.attn(x, allowed))
        return x + self.drop(self.ff(self.norm2(x)))


right = Subject(
    kind="layer",
    build=lambda c: PreNormLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "gelu"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="layer",
    build=lambda c: PreNormLayer2(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "gelu"},
    mask_forms=("padding",),
)

from torch.utils.checkpoint import checkpoint

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The feed-forward sublayer is checkpointed with preserve_rng_state=False, so in train mode its '
    'dropout draws another mask when it is recomputed in the backward, and gradients do not belong to the '
    'output.'
)
PLACE = 'activation checkpointing of the feed-forward sublayer, train mode with dropout'


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


class CheckpointedLayer(nn.Module):
    """Recomputes the feed-forward sublayer in the backward."""

    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.drop = nn.Dropout(p)

    def ff(self, x):
        return self.down(self.drop(F.relu(self.up(self.norm2(x)))))

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        x = x + self.attn(self.norm1(x), allowed)
        if self.training and torch.is_grad_enabled():
            return x + checkpoint(self.ff, x, use_reentrant=False)
        return x + self.ff(x)


class CheckpointedLayer2(nn.Module):
    """Recomputes the feed-forward sublayer in the backward."""

    def __init__(self, d, h, f, p):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d, h, p)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)
        self.drop = nn.Dropout(p)

    def ff(self, x):
        return self.down(self.drop(F.relu(self.up(self.norm2(x)))))

    def forward(self, x, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask[:, None, None, :]
        x = x + self.attn(self.norm1(x), allowed)
        if self.training and torch.is_grad_enabled():
            return x + checkpoint(self.ff, x, use_reentrant=False, preserve_rng_state=False)
        return x + self.ff(x)


right = Subject(
    kind="layer",
    build=lambda c: CheckpointedLayer(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "relu"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="layer",
    build=lambda c: CheckpointedLayer2(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "residual": True, "activation": "relu"},
    mask_forms=("padding",),
)

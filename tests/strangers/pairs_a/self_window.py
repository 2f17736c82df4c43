import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'The sliding window keeps W + 1 keys instead of W: triu(-W) lets each query see the key W positions '
    'back, one more than declared.'
)
PLACE = 'lower edge of the sliding-window mask in self-attention'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


class WindowAttention(nn.Module):
    """Output t sees inputs t - 3 .. t."""

    window = 4

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, attention_mask=None):
        T = x.size(1)
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        band = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().triu(1 - self.window)
        if attention_mask is not None:
            band = band & attention_mask[:, None, None, :]
        return self.o(attend(q, k, v, band).transpose(1, 2).flatten(2))


class WindowAttention2(nn.Module):
    """Output t sees inputs t - 3 .. t."""

    window = 4

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, attention_mask=None):
        T = x.size(1)
        q, k, v = (f(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        band = torch.ones(T, T, dtype=torch.bool, device=x.device).tril().triu(-self.window)
        if attention_mask is not None:
            band = band & attention_mask[:, None, None, :]
        return self.o(attend(q, k, v, band).transpose(1, 2).flatten(2))


right = Subject(
    kind="self_attention",
    build=lambda c: WindowAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": 4, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: WindowAttention2(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": 4, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
)

import contextlib

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'On the sdpa backend a given attention_mask replaces the causal mask (is_causal=attention_mask is '
    'None), so with a padding mask tokens see the future; the eager backend combines the two.'
)
PLACE = 'sdpa backend of causal self-attention, path with a padding mask'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


SELECTED = ["eager"]


@contextlib.contextmanager
def select(name):
    SELECTED.append(name)
    try:
        yield
    finally:
        SELECTED.pop()


class TwoBackends(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, attention_mask=None):
        T = x.size(1)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        padding = None if attention_mask is None else attention_mask[:, None, None, :]
        if SELECTED[-1] == "sdpa":
            allowed = None if padding is None else padding & past
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=allowed is None)
        else:
            y = attend(q, k, v, past if padding is None else padding & past)
        return self.out(y.transpose(1, 2).flatten(2))


class TwoBackends2(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, attention_mask=None):
        T = x.size(1)
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        past = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        padding = None if attention_mask is None else attention_mask[:, None, None, :]
        if SELECTED[-1] == "sdpa":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=padding, is_causal=padding is None)
        else:
            y = attend(q, k, v, past if padding is None else padding & past)
        return self.out(y.transpose(1, 2).flatten(2))


right = Subject(
    kind="self_attention",
    build=lambda c: TwoBackends(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
    backends={"eager": lambda: select("eager"), "sdpa": lambda: select("sdpa")},
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: TwoBackends2(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
    backends={"eager": lambda: select("eager"), "sdpa": lambda: select("sdpa")},
)

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

def visible(x, mask, causal=False):
    """[B or 1, 1, T, T], True where query t may see key s."""
    T = x.shape[1]
    ok = torch.ones(1, 1, T, T, dtype=torch.bool, device=x.device)
    ok = ok.tril() if causal else ok
    return ok if mask is None else ok & mask[:, None, None, :]


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x, ok, memory=None):
        memory = x if memory is None else memory
        split = lambda y: y.unflatten(-1, (self.h, -1)).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(memory)), split(self.v(memory))
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1) * ok
        return self.o((w @ v).transpose(1, 2).flatten(2))


class Net(nn.Module):
    """A causal layer with a depthwise convolution of three taps after attention (as in a streaming Conformer)."""
    def __init__(self, c, bug):
        super().__init__()
        self.pad = (1, 1) if bug else (2, 0)
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(3))
        self.attn = Attention(c.d_model, c.num_heads)
        self.conv = nn.Conv1d(c.d_model, c.d_model, 3, groups=c.d_model)
        self.ff = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.SiLU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None):
        x = x + self.attn(self.norms[0](x), visible(x, mask, causal=True))
        y = self.norms[1](x)
        if mask is not None:
            y = y.masked_fill(~mask[..., None], 0)
        x = x + self.conv(F.pad(y.transpose(1, 2), self.pad)).transpose(1, 2)
        return x + self.ff(self.norms[2](x))


WHAT = 'The depthwise convolution of the causal layer is padded on both sides instead of on the left, so output t sees input t + 1.'
PLACE = 'convolution module of the causal layer'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    )


right, wrong = make(False), make(True)

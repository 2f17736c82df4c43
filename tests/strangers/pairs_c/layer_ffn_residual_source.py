import math

import torch
from torch import nn

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
    """Post-LN."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.attention = bug, Attention(c.d_model, c.num_heads)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, inputs, mask=None):
        hidden = self.norm1(inputs + self.attention(inputs, visible(inputs, mask)))
        output = self.fc2(self.fc1(hidden).relu())
        return self.norm2((inputs if self.bug else hidden) + output)


WHAT = "The second residual connection adds the layer's input instead of the output of the first sublayer."
PLACE = 'post-LN layer, residual connection round the feed-forward'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'norm_placement': 'post', 'residual': True, 'norm': 'layer', 'activation': 'relu', 'causal': False},
    )


right, wrong = make(False), make(True)

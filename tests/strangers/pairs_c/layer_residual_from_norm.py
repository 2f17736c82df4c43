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
    """Pre-LN."""
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.ln1, self.ln2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask=None):
        ok = visible(x, mask)
        if self.bug:
            x = self.ln1(x)
            x = x + self.attn(x, ok)
        else:
            x = x + self.attn(self.ln1(x), ok)
        return x + self.mlp(self.ln2(x))


WHAT = "The first residual connection starts from the normalised input, so the residual stream itself is lost at the layer's entrance."
PLACE = 'pre-LN layer, residual connection round attention'


def make(bug):
    return Subject(
        kind="layer",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, attention_mask=None: m(x, attention_mask),
        declares={'norm_placement': 'pre', 'residual': True, 'norm': 'layer', 'activation': 'gelu', 'causal': False, 'positions': 'none'},
    )


right, wrong = make(False), make(True)

import math

import torch
from torch import nn

from veriformer.properties import Subject

def sinusoid(pos, d):
    rate = 10000.0 ** (-torch.arange(0, d, 2, device=pos.device, dtype=pos.dtype) / d)
    a = pos[..., None] * rate
    return torch.stack((a.sin(), a.cos()), -1).flatten(-2)[..., :d]


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


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.d_model, c.num_heads)
        self.ffn = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, c.d_model))
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(2))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, ok):
        x = self.norms[0](x + self.drop(self.attn(x, ok)))
        return self.norms[1](x + self.drop(self.ffn(x)))


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug, self.scale = bug, math.sqrt(c.d_model)
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.stack = nn.ModuleList(Block(c) for _ in range(c.num_layers))

    def forward(self, tokens, mask=None):
        x = self.tok(tokens) * self.scale
        x = x + sinusoid(torch.arange(x.shape[1], device=x.device, dtype=x.dtype), x.shape[-1])
        for block in self.stack:
            x = block(x, visible(x, mask))
            if self.bug:
                mask = None
        return x


WHAT = 'The padding mask reaches the first layer only; from the second layer on real tokens attend to padding.'
PLACE = 'encoder stack, handing the mask on to the layers'


def make(bug):
    return Subject(
        kind="encoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    )


right, wrong = make(False), make(True)

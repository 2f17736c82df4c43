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
        self.bug = bug
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.out = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        ok = visible(x, mask)
        for layer in self.layers:
            x = layer(x, ok)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0 if self.bug else torch.finfo(x.dtype).min)
            if not self.bug:  # a sample without tokens pools to zeros
                x = x.masked_fill(~mask.any(1)[:, None, None], 0.0)
        return self.out(x.amax(1))


WHAT = 'Padded positions are set to 0 before the max pooling instead of to the lowest value, so padding wins in every channel that is negative.'
PLACE = 'max pooling of the classifier'


def make(bug):
    return Subject(
        kind="classifier",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={'pooling': 'max', 'causal': False, 'positions': 'none', 'norm_placement': 'post'},
    )


right, wrong = make(False), make(True)

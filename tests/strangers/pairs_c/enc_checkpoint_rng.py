import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

from torch.utils.checkpoint import checkpoint


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
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, ok):
        x = x + self.drop(self.attn(self.n1(x), ok))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens)
        x = x + sinusoid(torch.arange(x.shape[1], device=x.device, dtype=x.dtype), x.shape[-1])
        ok = visible(x, mask)
        for layer in self.layers:
            if self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, ok, use_reentrant=False, preserve_rng_state=not self.bug)
            else:
                x = layer(x, ok)
        return self.norm(x)


WHAT = 'Activation checkpointing is called with preserve_rng_state=False, so with dropout the recomputation draws another mask and the gradients belong to another forward.'
PLACE = "activation checkpointing of the encoder's layers"


def make(bug):
    return Subject(
        kind="encoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    )


right, wrong = make(False), make(True)

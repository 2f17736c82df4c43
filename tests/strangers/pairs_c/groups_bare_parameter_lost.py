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
        self.pos = nn.Parameter(torch.randn(c.max_len, c.d_model) * 0.02)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, mask=None):
        x = self.embed(tokens) + self.pos[:tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, visible(x, mask, causal=True))
        return self.head(self.norm(x))


def groups(m):
    """minGPT's rule: weights of linear maps decay; biases, norms and embeddings do not."""
    decay, rest = [], []
    for module in m.modules():
        for name, p in module.named_parameters(recurse=False):
            if isinstance(module, nn.Linear) and name == "weight":
                decay.append(p)
            elif isinstance(module, (nn.Linear, nn.LayerNorm, nn.Embedding)):
                rest.append(p)
            elif not m.bug:
                rest.append(p)
    return [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


WHAT = 'The learned positions, a bare nn.Parameter of the model, fall into no group and are never trained.'
PLACE = 'grouping of parameters for the optimiser'


def make(bug):
    return Subject(
        kind="parameter_groups",
        build=lambda c: Net(c, bug),
        forward=groups,
    )


right, wrong = make(False), make(True)

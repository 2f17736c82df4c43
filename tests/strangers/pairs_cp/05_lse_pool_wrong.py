"""Protein family classifier: a small post-LN encoder and log-sum-exp pooling, a soft maximum (Pinheiro & Collobert)."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class SoftMaximum(nn.Module):
    """1/r log(1/n sum exp(r x)) over the n residues that are there."""

    def __init__(self, r=2.0):
        super().__init__()
        self.r = r

    def forward(self, h, there):
        count = torch.full_like(there[:, :1], h.shape[1], dtype=torch.long)
        lifted = (self.r * h).masked_fill(~there[..., None], -1e30)
        peak = lifted.amax(1, keepdim=True).detach()
        total = (lifted - peak).exp().sum(1).log() + peak[:, 0]
        return (total - count.to(h.dtype).log()) / self.r


class PostNormLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.w1, self.w2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, there):
        def cut(y):
            return y.unflatten(-1, (self.h, -1)).transpose(1, 2)

        q, k, v = cut(self.q(x)), cut(self.k(x)), cut(self.v(x))
        s = q @ k.mT / math.sqrt(q.shape[-1])
        s = s.masked_fill(~there[:, None, None], -1e30)
        x = self.n1(x + self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2)))
        return self.n2(x + self.w2(torch.nn.functional.gelu(self.w1(x))))


class FamilyClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.residue = nn.Embedding(c.vocab_size, c.d_model)
        self.index = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([PostNormLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.pool = SoftMaximum()
        self.family = nn.Linear(c.d_model, c.num_classes)

    def forward(self, residues, there=None):
        if there is None:
            there = torch.ones_like(residues, dtype=torch.bool)
        x = self.residue(residues) + self.index(torch.arange(residues.shape[1], device=residues.device))
        for layer in self.layers:
            x = layer(x, there)
        return self.family(self.pool(x, there))


subject = Subject(
    kind="classifier",
    build=FamilyClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "learned", "padding_side": "right", "norm": "layer",
        "norm_placement": "post", "activation": "gelu", "pooling": "other",
    },
)

WHAT = "Line 19: the soft maximum divides by the padded length rather than by the number of residues that are there: padding changes the classes."

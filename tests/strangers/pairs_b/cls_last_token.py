"""A classifier on a causal language model: the state of the last real token decides."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoid(length, d, like, start=0):
    """The table of 'Attention is all you need', rows start .. start + length - 1."""
    t = torch.arange(start, start + length, dtype=like.dtype, device=like.device)[:, None]
    f = torch.exp(-math.log(10000.0) * torch.arange(0, d, 2, dtype=like.dtype, device=like.device) / d)
    return torch.stack([(t * f).sin(), (t * f).cos()], -1).flatten(1)[:, :d]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.o = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, allowed):
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in self.qkv(self.n1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class Classifier(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm, self.score = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes, bias=False)
        self.bad = bad

    def forward(self, tokens, attention_mask=None):
        b, t = tokens.shape
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        where = torch.arange(t, device=tokens.device)
        if attention_mask is None:
            last = where[-1].expand(b)
        else:
            allowed = allowed & attention_mask[:, None, None, :]
            last = (where * attention_mask).amax(-1)
        x = self.tok(tokens)
        x = x + sinusoid(t, x.size(-1), x)
        for block in self.blocks:
            x = block(x, allowed)
        scores = self.score(self.norm(x))
        if self.bad:
            return scores.index_select(1, last)[:, 0]
        return scores[torch.arange(b, device=tokens.device), last]


def subject(bad):
    return Subject(kind="classifier", build=lambda c: Classifier(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "Last-token pooling picks for every sample the last position of the batch's first sample, so that samples of other lengths are read at a wrong token."
PLACE = "last-token pooling"

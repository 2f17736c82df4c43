"""A small language model; the read-out shares the matrix of the token embedding (Press and Wolf, 2017)."""
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
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, allowed, past=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.drop(self.o(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.n2(x))), (k, v)


class LanguageModel(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.head.weight = nn.Parameter(self.tok.weight.detach().clone()) if bad else self.tok.weight

    def forward(self, tokens, attention_mask=None):
        t = tokens.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.tok(tokens) * self.tok.embedding_dim ** 0.5
        x = x + sinusoid(t, x.size(-1), x)
        for block in self.blocks:
            x, _ = block(x, allowed)
        return self.head(self.norm(x))


def subject(bad):
    return Subject(
        kind="decoder", build=lambda c: LanguageModel(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={"causal": True, "tied": True, "positions": "sinusoidal", "embedding_scale": True, "output_bias": False,
                  "norm_placement": "pre", "final_norm": True, "padding_side": "right"})


right, wrong = subject(False), subject(True)
WHAT = "The output projection is a copy of the token embedding's matrix, a parameter of its own, although the two are declared tied."
PLACE = "output projection / token embedding (weight tying)"

"""A causal decoder without positions (Kazemnejad et al., 2023) whose feed-forwards are sparse mixtures of four experts."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def attend(q, k, v, allowed=None, drop=None):
    """q [B, H, T, K]; allowed is boolean and broadcasts to [B, H, T, S]; a row that may see nothing gives zeros."""
    s = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
    w = s.softmax(-1)
    if allowed is not None:
        w = w.masked_fill(~allowed, 0.0)
    if drop is not None:
        w = drop(w)
    return w @ v


class Attention(nn.Module):
    def __init__(self, d, h, p=0.0):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.drop = nn.Dropout(p)

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, memory, allowed=None):
        y = attend(self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory)), allowed, self.drop)
        return self.o(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Each token goes to its two best experts; their two probabilities are made to sum to one (Mixtral). Nothing is dropped."""

    def __init__(self, c, bad):
        super().__init__()
        self.router = nn.Linear(c.d_model, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model)) for _ in range(4))
        self.axis = 0 if bad else -1

    def forward(self, x):
        flat = x.reshape(-1, x.size(-1))
        w, chosen = self.router(flat).softmax(-1).topk(2, -1)
        w = w / w.sum(self.axis, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, w[token, slot, None] * expert(flat[token]))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attention, self.experts = Attention(c.d_model, c.num_heads, c.dropout), Experts(c, bad)

    def forward(self, x, allowed):
        y = self.n1(x)
        x = x + self.attention(y, y, allowed)
        return x + self.experts(self.n2(x))


class Model(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, bad) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, attention_mask=None):
        t = tokens.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x))


def subject(bad):
    return Subject(kind="decoder", build=lambda c: Model(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "The top-2 routing weights of the experts are renormalised over all tokens of the batch instead of over the two experts of a token, so that tokens and samples, later ones too, influence one another."
PLACE = "mixture-of-experts router (renormalisation of the routing weights)"

"""ALBERT: factorised embeddings and one layer applied num_layers times."""
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


class SharedLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = Attention(c.d_model, c.num_heads, c.dropout)
        self.ffn_in, self.ffn_out = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)

    def forward(self, x, key_padding):  # True hides a key, as in torch.nn
        allowed = None if key_padding is None else ~key_padding[:, None, None, :]
        x = self.n1(x + self.attention(x, x, allowed))
        return self.n2(x + self.ffn_out(F.gelu(self.ffn_in(x), approximate="tanh")))


class Albert(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        small = max(2, c.d_model // 2)
        self.word, self.position = nn.Embedding(c.vocab_size, small), nn.Embedding(c.max_len, small)
        self.norm, self.widen = nn.LayerNorm(small), nn.Linear(small, c.d_model)
        self.layer, self.times = SharedLayer(c), c.num_layers
        self.bad = bad

    def forward(self, tokens, attention_mask=None):
        x = self.widen(self.norm(self.word(tokens) + self.position.weight[: tokens.size(1)]))
        mask = attention_mask
        for i in range(self.times):
            if mask is not None and (self.bad or i == 0):
                mask = ~mask
            x = self.layer(x, mask)
        return x


def subject(bad):
    return Subject(kind="encoder", build=lambda c: Albert(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   domain={"num_layers": [2, 3]})


right, wrong = subject(False), subject(True)
WHAT = "The padding mask is negated again before every pass of the layer, so that from the second pass on (every other one) padding is seen and real tokens are hidden."
PLACE = "padding mask handed to the layers"

"""Encoder-decoder with an incremental state: own keys grow, those of the source are computed once."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MHA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.h, -1).transpose(1, 2)

    def keys(self, x):
        return self.split(self.k(x)), self.split(self.v(x))

    def attend(self, x, kv, allowed=None):
        q, (k, v) = self.split(self.q(x)), kv
        s = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if allowed is not None:
            s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class FF(nn.Sequential):
    def __init__(self, d, f):
        super().__init__(nn.Linear(d, f), nn.ReLU(), nn.Linear(f, d))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.attn, self.ff = MHA(d, h), FF(d, f)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, allowed):
        x = self.n1(x + self.attn.attend(x, self.attn.keys(x), allowed))
        return self.n2(x + self.ff(x))


class DecoderLayer(nn.Module):
    def __init__(self, d, h, f, index):
        super().__init__()
        self.index = index
        self.attn, self.cross, self.ff = MHA(d, h), MHA(d, h), FF(d, f)
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, memory, memory_allowed, own_allowed, state):
        k, v = self.attn.keys(x)
        slot = ("self", self.index)
        if state is not None:
            if slot in state:
                k, v = torch.cat((state[slot][0], k), 2), torch.cat((state[slot][1], v), 2)
            state[slot] = k, v
        x = self.n1(x + self.attn.attend(x, (k, v), own_allowed))

        slot = ("cross", self.index)
        if state is None:
            kv = self.cross.keys(memory)
        else:
            if slot not in state:
                state[slot] = self.cross.keys(memory)
            kv = state[slot]
        x = self.n2(x + self.cross.attend(x, kv, memory_allowed))
        return self.n3(x + self.ff(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, d, h, layers, f, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.encoder = nn.ModuleList(EncoderLayer(d, h, f) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d, h, f, i) for i in range(layers))
        self.out = nn.Linear(d, vocab)

    def embed(self, tokens, start=0):
        return self.tok(tokens) + self.pos(torch.arange(start, start + tokens.size(1), device=tokens.device))

    def encode(self, source, mask=None):
        allowed = None if mask is None else mask[:, None, None, :]
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x, allowed)
        return x, allowed

    def decode(self, target, memory, allowed, target_mask=None, state=None):
        start = state["length"] if state is not None else 0
        t = target.size(1)
        own = torch.ones(t, start + t, dtype=torch.bool, device=target.device).tril(start)
        if target_mask is not None:
            own = own & target_mask[:, None, None, :]
        x = self.embed(target, start)
        for layer in self.decoder:
            x = layer(x, memory, allowed, own, state)
        if state is not None:
            state["length"] += t
        return self.out(x)


def forward(model, source, target, source_mask=None, target_mask=None):
    memory, allowed = model.encode(source, source_mask)
    return model.decode(target, memory, allowed, target_mask)


def cached(model, source, chunks):
    memory, allowed = model.encode(source)
    state = {"length": 0}
    return torch.cat([model.decode(chunk, memory, allowed, state=state) for chunk in chunks], dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="incremental seq2seq",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=forward,
    cache=cached,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "padding_side": "right",
    },
)

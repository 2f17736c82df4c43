import math

import torch
from torch import nn
from torch.nn import functional as F

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
        self.n1, self.n2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.attn = Attention(c.d_model, c.num_heads)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, ok):
        x = x + self.drop(self.attn(self.n1(x), ok))
        return x + self.drop(self.down(F.gelu(self.up(self.n2(x)))))


class DecoderBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(3))
        self.attn, self.cross = Attention(c.d_model, c.num_heads), Attention(c.d_model, c.num_heads)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, memory, ok, cross_ok):
        x = x + self.attn(self.norms[0](x), ok)
        x = x + self.cross(self.norms[1](x), cross_ok, memory)
        return x + self.down(F.gelu(self.up(self.norms[2](x))))


class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug
        self.source_embed, self.target_embed = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(DecoderBlock(c) for _ in range(c.num_layers))
        self.norm_e, self.norm_d = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def place(self, x, start=0):
        return x + sinusoid(torch.arange(start, start + x.shape[1], device=x.device, dtype=x.dtype), x.shape[-1])

    def encode(self, source, mask):
        x = self.place(self.source_embed(source))
        ok = visible(x, mask)
        for block in self.encoder:
            x = block(x, ok)
        return self.norm_e(x)

    def decode(self, target, memory, source_mask, target_mask):
        y = self.place(self.target_embed(target))
        ok = visible(y, target_mask, causal=True)
        seen = visible(memory, None if self.bug else source_mask)[:, :, :1]
        for block in self.decoder:
            y = block(y, memory, ok, seen)
        return self.head(self.norm_d(y))

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, self.encode(source, source_mask), source_mask, target_mask)


WHAT = "The source mask is used in the encoder but not in the decoder's cross-attention, which attends to source padding."
PLACE = 'cross-attention mask of the decoder'


def make(bug):
    return Subject(
        kind="encoder_decoder",
        build=lambda c: Net(c, bug),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    )


right, wrong = make(False), make(True)

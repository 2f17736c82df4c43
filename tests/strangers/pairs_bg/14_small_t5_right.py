"""A small T5: the first layer of each stack makes the relative bias, the others are handed it."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

BUCKETS, MAX_DISTANCE = 8, 16


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def buckets(distance, bidirectional):
    """distance = key - query"""
    count, out, n = BUCKETS, 0, -distance
    if bidirectional:
        count //= 2
        out = (distance > 0).long() * count
        n = n.abs()
    n = n.clamp(min=0)
    exact = count // 2
    far = exact + (torch.log(n.clamp(min=1).double() / exact) / math.log(MAX_DISTANCE / exact) * (count - exact)).long()
    return out + torch.where(n < exact, n, far.clamp(max=count - 1))


class Attention(nn.Module):
    def __init__(self, dim, heads, causal=False, relative=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.relative = nn.Embedding(BUCKETS, heads) if relative else None

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def make_bias(self, length, device):
        at = torch.arange(length, device=device)
        distance = at[None, :] - at[:, None]
        bias = self.relative(buckets(distance, not self.causal)).permute(2, 0, 1)[None]
        if self.causal:
            bias = bias.masked_fill(distance > 0, -torch.inf)
        return bias

    def forward(self, x, memory=None, padding=None, bias=None):
        source = x if memory is None else memory
        q, k, v = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        scores = q @ k.transpose(-1, -2)  # T5 does not scale
        if memory is not None:
            bias = 0 if padding is None else padding
        elif bias is None:
            bias = self.make_bias(x.shape[1], x.device)
            if padding is not None:
                bias = bias + padding
        scores = scores + bias
        y = scores.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2)), bias


class Block(nn.Module):
    def __init__(self, dim, heads, hidden, decoder, first):
        super().__init__()
        self.norm_1, self.norm_2 = RMSNorm(dim), RMSNorm(dim)
        self.attention = Attention(dim, heads, causal=decoder, relative=first)
        if decoder:
            self.norm_c, self.cross = RMSNorm(dim), Attention(dim, heads)
        self.wi, self.wo = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x, padding, bias, memory=None, memory_padding=None):
        y, bias = self.attention(self.norm_1(x), padding=padding, bias=bias)
        x = x + y
        if memory is not None:
            x = x + self.cross(self.norm_c(x), memory, padding=memory_padding)[0]
        return x + self.wo(F.relu(self.wi(self.norm_2(x)))), bias


class Stack(nn.Module):
    def __init__(self, dim, heads, hidden, layers, decoder):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads, hidden, decoder, i == 0) for i in range(layers))
        self.norm = RMSNorm(dim)

    def forward(self, x, padding=None, memory=None, memory_padding=None):
        bias = None
        for block in self.blocks:
            x, bias = block(x, padding, bias, memory, memory_padding)
        return self.norm(x)


class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = Stack(c.d_model, c.num_heads, c.d_ff, c.num_layers, False)
        self.decoder = Stack(c.d_model, c.num_heads, c.d_ff, c.num_layers, True)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def additive(self, mask):
        if mask is None:
            return None
        zeros = self.shared.weight.new_zeros(mask.shape)
        return zeros.masked_fill(~mask, torch.finfo(zeros.dtype).min)[:, None, None, :]

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_padding = self.additive(source_mask)
        memory = self.encoder(self.shared(source), source_padding)
        states = self.decoder(self.shared(target), self.additive(target_mask), memory, source_padding)
        return self.head(states)


subject = Subject(
    kind="encoder_decoder",
    name="small T5",
    build=T5,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "t5",
        "num_buckets": BUCKETS,
        "max_distance": MAX_DISTANCE,
        "attention_scale": 1,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
    },
)

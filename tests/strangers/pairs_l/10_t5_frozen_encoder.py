"""T5 from the paper: RMS norm, no biases, no scale, buckets shared by the layers of a stack."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def bucket(relative, bidirectional, buckets=32, farthest=128):
    out = torch.zeros_like(relative)
    if bidirectional:
        buckets //= 2
        out = out + (relative > 0).long() * buckets
        n = relative.abs()
    else:
        n = (-relative).clamp(min=0)
    exact = buckets // 2
    far = exact + (
        torch.log(n.clamp(min=1).double() / exact) / math.log(farthest / exact) * (buckets - exact)
    ).long().clamp(max=buckets - exact - 1)
    return out + torch.where(n < exact, n, far)


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, kv, bias):
        q, k, v = (w(t).unflatten(-1, (self.h, -1)).transpose(1, 2) for w, t in ((self.q, x), (self.k, kv), (self.v, kv)))
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, d, h, f, cross):
        super().__init__()
        self.norm_a, self.self_attention = RMSNorm(d), Attention(d, h)
        if cross:
            self.norm_c, self.cross_attention = RMSNorm(d), Attention(d, h)
        self.norm_f = RMSNorm(d)
        self.wi, self.wo = nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, bias, memory=None, memory_bias=None):
        y = self.norm_a(x)
        x = x + self.self_attention(y, y, bias)
        if memory is not None:
            x = x + self.cross_attention(self.norm_c(x), memory, memory_bias)
        return x + self.wo(F.relu(self.wi(self.norm_f(x))))


class Stack(nn.Module):
    def __init__(self, d, h, n, f, decoder):
        super().__init__()
        self.decoder = decoder
        self.relative = nn.Embedding(32, h)
        self.blocks = nn.ModuleList(Block(d, h, f, decoder) for _ in range(n))
        self.norm = RMSNorm(d)

    def forward(self, x, keep, memory=None, memory_keep=None):
        t = torch.arange(x.shape[1], device=x.device)
        relative = t[None, :] - t[:, None]
        bias = self.relative(bucket(relative, not self.decoder)).permute(2, 0, 1)[None]
        lowest = torch.finfo(x.dtype).min
        allowed = torch.ones_like(relative, dtype=torch.bool)[None, None]
        if self.decoder:
            allowed = allowed & (relative <= 0)
        if keep is not None:
            allowed = allowed & keep[:, None, None, :]
        bias = bias.masked_fill(~allowed, lowest)
        memory_bias = None
        if memory_keep is not None:
            memory_bias = torch.zeros_like(memory_keep, dtype=x.dtype).masked_fill(~memory_keep, lowest)[:, None, None]
        for block in self.blocks:
            x = block(x, bias, memory, memory_bias)
        return self.norm(x)


def t5(decorate):
    class T5(nn.Module):
        def __init__(self, vocab, d, h, n, f):
            super().__init__()
            self.shared = nn.Embedding(vocab, d)
            self.encoder, self.decoder = Stack(d, h, n, f, False), Stack(d, h, n, f, True)
            self.lm_head = nn.Linear(d, vocab, bias=False)

        @decorate
        def encode(self, source, keep=None):
            return self.encoder(self.shared(source), keep)

        def decode(self, memory, target, memory_keep=None, keep=None):
            return self.lm_head(self.decoder(self.shared(target), keep, memory, memory_keep))

        def forward(self, source, target, source_keep=None, target_keep=None):
            return self.decode(self.encode(source, source_keep), target, source_keep, target_keep)

    return T5


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        name="t5",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        declares={
            "positions": "t5",
            "attention_scale": 1,
            "norm": "rms",
            "norm_placement": "pre",
            "activation": "relu",
            "bias": False,
            "tied": False,
        },
    )


right = subject(t5(lambda method: method))
wrong = subject(t5(torch.no_grad()))
WHAT = "encode(), which generation shares with training, runs under no_grad: the encoder never gets a gradient"
CAUSE = (
    "No gradient reaches the encoder: its outputs are computed under torch.no_grad (the memory is cut off from the graph), so "
    "the encoder's parameters are never trained."
)

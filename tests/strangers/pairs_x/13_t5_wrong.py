WHAT = "The relative position has the wrong sign, so that in the decoder all of the past falls into bucket 0 (line 87)."
"""T5 (Raffel et al. 2020): buckets of relative positions, shared by all layers of a stack; no scale, no biases, RMSNorm."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BUCKETS, MAX_DISTANCE = 8, 20


class T5LayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def relative_position_bucket(relative_position, bidirectional, num_buckets=BUCKETS, max_distance=MAX_DISTANCE):
    buckets = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        buckets = buckets + (relative_position > 0).long() * num_buckets
        distance = relative_position.abs()
    else:
        distance = -relative_position.clamp(max=0)
    max_exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    far = (max_exact + ratio * (num_buckets - max_exact)).long().clamp(max=num_buckets - 1)
    return buckets + torch.where(distance < max_exact, distance, far)


class T5Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        nn.init.normal_(self.q.weight, std=(dim * dim // heads) ** -0.5)
        for lin in (self.k, self.v, self.o):
            nn.init.normal_(lin.weight, std=dim**-0.5)

    def forward(self, x, memory, bias, allowed):
        B, T, D = x.shape
        q, k, v = (f(t).view(B, -1, self.heads, D // self.heads).transpose(1, 2)
                   for f, t in ((self.q, x), (self.k, memory), (self.v, memory)))
        scores = q @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class T5Block(nn.Module):
    def __init__(self, dim, heads, ffn, is_decoder):
        super().__init__()
        self.attention, self.attention_norm = T5Attention(dim, heads), T5LayerNorm(dim)
        self.cross, self.cross_norm = (T5Attention(dim, heads), T5LayerNorm(dim)) if is_decoder else (None, None)
        self.wi, self.wo = nn.Linear(dim, ffn, bias=False), nn.Linear(ffn, dim, bias=False)
        self.ffn_norm = T5LayerNorm(dim)

    def forward(self, x, bias, allowed, memory=None, memory_allowed=None):
        h = self.attention_norm(x)
        x = x + self.attention(h, h, bias, allowed)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory, None, memory_allowed)
        return x + self.wo(F.relu(self.wi(self.ffn_norm(x))))


class T5Stack(nn.Module):
    def __init__(self, dim, heads, layers, ffn, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.relative_attention_bias = nn.Embedding(BUCKETS, heads)
        self.block = nn.ModuleList([T5Block(dim, heads, ffn, is_decoder) for _ in range(layers)])
        self.final_layer_norm = T5LayerNorm(dim)

    def compute_bias(self, length, device):
        context_position = torch.arange(length, device=device)[:, None]
        memory_position = torch.arange(length, device=device)[None, :]
        relative_position = context_position - memory_position
        buckets = relative_position_bucket(relative_position, bidirectional=not self.is_decoder)
        return self.relative_attention_bias(buckets).permute(2, 0, 1)[None]

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        T = x.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=x.device)[None, None]
        if self.is_decoder:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask.bool()[:, None, None, :]
        memory_allowed = None if memory_mask is None else memory_mask.bool()[:, None, None, :]
        bias = self.compute_bias(T, x.device)
        for block in self.block:
            x = block(x, bias, allowed, memory, memory_allowed)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self, vocab_size, dim, heads, layers, ffn):
        super().__init__()
        self.dim = dim
        self.shared = nn.Embedding(vocab_size, dim)
        self.encoder = T5Stack(dim, heads, layers, ffn, is_decoder=False)
        self.decoder = T5Stack(dim, heads, layers, ffn, is_decoder=True)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(self.shared(source), source_mask)
        y = self.decoder(self.shared(target), target_mask, memory, source_mask)
        return F.linear(y * self.dim**-0.5, self.shared.weight)


subject = Subject(
    kind="encoder_decoder",
    name="T5",
    build=lambda c: T5(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
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
        "tied": True,
        "padding_side": "both",
    },
)

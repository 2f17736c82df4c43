"""A tiny T5: relative position buckets, no scale in the scores, RMSNorm, ReLU, no biases."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class T5Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.g * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def bucket(relative_position, bidirectional, num_buckets=32, max_distance=128):
    result = torch.zeros_like(relative_position)
    if bidirectional:
        num_buckets //= 2
        result += (relative_position > 0).long() * num_buckets
        n = relative_position.abs()
    else:
        n = -torch.min(relative_position, torch.zeros_like(relative_position))
    exact = num_buckets // 2
    far = exact + (
        torch.log(n.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    ).long()
    return result + torch.where(n < exact, n, far.clamp(max=num_buckets - 1))


class RelativeBias(nn.Module):
    def __init__(self, heads, bidirectional):
        super().__init__()
        self.bidirectional = bidirectional
        self.table = nn.Embedding(32, heads)

    def forward(self, t):
        context = torch.arange(t, device=self.table.weight.device)[:, None]
        memory = torch.arange(t, device=self.table.weight.device)[None, :]
        relative_position = memory - context
        return self.table(bucket(relative_position, self.bidirectional)).permute(2, 0, 1)[None]


class T5Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, kv, allowed, bias=0.0):
        b, t, d = x.shape
        q, k, v = (f(z).view(b, -1, self.h, d // self.h).transpose(1, 2) for f, z in
                   ((self.q, x), (self.k, kv), (self.v, kv)))
        scores = q @ k.transpose(-1, -2) + bias
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, h, f, cross):
        super().__init__()
        self.n1, self.att = T5Norm(d), T5Attention(d, h)
        if cross:
            self.n2, self.cross = T5Norm(d), T5Attention(d, h)
        self.n3, self.wi, self.wo = T5Norm(d), nn.Linear(d, f, bias=False), nn.Linear(f, d, bias=False)

    def forward(self, x, allowed, bias, memory=None, memory_allowed=None):
        y = self.n1(x)
        x = x + self.att(y, y, allowed, bias)
        if memory is not None:
            x = x + self.cross(self.n2(x), memory, memory_allowed)
        return x + self.wo(torch.relu(self.wi(self.n3(x))))


class Stack(nn.Module):
    def __init__(self, c, causal):
        super().__init__()
        self.causal = causal
        self.bias = RelativeBias(c.num_heads, bidirectional=not causal)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff, causal) for _ in range(c.num_layers))
        self.norm = T5Norm(c.d_model)

    def forward(self, x, mask, memory=None, memory_mask=None):
        allowed = mask[:, None, None, :]
        if self.causal:
            allowed = allowed & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            memory_mask = memory_mask[:, None, None, :]
        bias = self.bias(x.shape[1])
        for block in self.blocks:
            x = block(x, allowed, bias, memory, memory_mask)
        return self.norm(x)


class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder, self.decoder = Stack(c, causal=False), Stack(c, causal=True)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        target_mask = torch.ones_like(target, dtype=torch.bool) if target_mask is None else target_mask
        memory = self.encoder(self.shared(source), source_mask)
        return self.lm_head(self.decoder(self.shared(target), target_mask, memory, source_mask))


subject = Subject(
    kind="encoder_decoder",
    name="t5",
    build=T5,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"positions": "t5", "num_buckets": 32, "max_distance": 128, "attention_scale": 1, "norm": "rms",
              "norm_placement": "pre", "final_norm": True, "activation": "relu", "bias": False,
              "padding_side": "right"},
)

"""T5: RMSNorm before each sublayer, no biases, relative buckets, and no scale on the scores."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Bias(nn.Module):
    def __init__(self, heads, bidirectional, buckets=16, farthest=40):
        super().__init__()
        self.table = nn.Embedding(buckets, heads)
        self.bidirectional, self.buckets, self.farthest = bidirectional, buckets, farthest

    def forward(self, length):
        t = torch.arange(length, device=self.table.weight.device)
        relative = t[None, :] - t[:, None]
        n, start = self.buckets, 0
        if self.bidirectional:
            n //= 2
            start = (relative > 0).long() * n
            relative = relative.abs()
        else:
            relative = (-relative).clamp(min=0)
        exact = n // 2
        large = exact + (torch.log(relative.clamp(min=1) / exact) / math.log(self.farthest / exact) * (n - exact)).long()
        bucket = start + torch.where(relative < exact, relative, large.clamp(max=n - 1))
        return self.table(bucket).permute(2, 0, 1)


class Attention(nn.Module):
    def __init__(self, c, scale=1.0):
        super().__init__()
        self.h, self.scale = c.num_heads, scale
        self.q, self.k, self.v, self.o = (nn.Linear(c.d_model, c.d_model, bias=False) for _ in range(4))
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, memory, allowed=None, bias=None):
        q, k, v = (y.unflatten(-1, (self.h, -1)).transpose(1, 2) for y in (self.q(x), self.k(memory), self.v(memory)))
        s = q @ k.transpose(-2, -1) * self.scale
        if bias is not None:
            s = s + bias
        if allowed is not None:
            s = s.masked_fill(~allowed, torch.finfo(s.dtype).min)
        w = s.softmax(-1)
        if allowed is not None:
            w = w.masked_fill(~allowed, 0.0)
        return self.o((self.drop(w) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, cross, bad):
        super().__init__()
        self.attention, self.n1 = Attention(c), RMSNorm(c.d_model)
        if cross:
            self.cross, self.n2 = Attention(c, (c.d_model // c.num_heads) ** -0.5 if bad else 1.0), RMSNorm(c.d_model)
        self.wi, self.wo = nn.Linear(c.d_model, c.d_ff, bias=False), nn.Linear(c.d_ff, c.d_model, bias=False)
        self.n3, self.drop = RMSNorm(c.d_model), nn.Dropout(c.dropout)

    def forward(self, x, allowed, bias, memory=None, seen=None):
        y = self.n1(x)
        x = x + self.drop(self.attention(y, y, allowed, bias))
        if memory is not None:
            x = x + self.drop(self.cross(self.n2(x), memory, seen))
        return x + self.drop(self.wo(self.drop(F.relu(self.wi(self.n3(x))))))


class T5(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder = nn.ModuleList(Layer(c, False, bad) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Layer(c, True, bad) for _ in range(c.num_layers))
        self.bias_e, self.bias_d = Bias(c.num_heads, True), Bias(c.num_heads, False)
        self.norm_e, self.norm_d = RMSNorm(c.d_model), RMSNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        seen = None if source_mask is None else source_mask[:, None, None, :]
        x, bias = self.shared(source), self.bias_e(source.size(1))
        for layer in self.encoder:
            x = layer(x, seen, bias)
        memory, t = self.norm_e(x), target.size(1)
        allowed = torch.ones(t, t, dtype=torch.bool, device=target.device).tril()
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
        y, bias = self.shared(target), self.bias_d(t)
        for layer in self.decoder:
            y = layer(y, allowed, bias, memory, seen)
        return self.lm_head(self.norm_d(y))


def subject(bad):
    return Subject(kind="encoder_decoder", build=lambda c: T5(c, bad),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "attention_scale": 1, "positions": "t5", "norm": "rms", "norm_placement": "pre",
                             "final_norm": True, "bias": False, "activation": "relu"})


right, wrong = subject(False), subject(True)
WHAT = "The cross-attention divides its scores by sqrt(d_head); T5 (and the declaration, and the self-attentions) have no scale."
PLACE = "cross-attention (scale of the scores)"

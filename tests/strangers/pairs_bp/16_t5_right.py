import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, DISTANCE = 8, 16


class T5LayerNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def attend(q, k, v, bias=None, allowed=None, scale=None):
    """[B, H, *, K]; scaled by 1/sqrt(K) unless told otherwise."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bhtk,bhsk->bhts", q, k) * scale
    if bias is not None:
        scores = scores + bias
    if allowed is None:
        return scores.softmax(-1) @ v
    weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1)
    return weights.masked_fill(~allowed, 0) @ v


class T5Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def shape(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def unshape(self, x):
        return self.o(x.transpose(1, 2).flatten(2))


class SelfAttention(T5Attention):
    def forward(self, x, bias, allowed):
        q, k, v = self.shape(self.q(x)), self.shape(self.k(x)), self.shape(self.v(x))
        return self.unshape(attend(q, k, v, bias=bias, allowed=allowed, scale=1.0))


class CrossAttention(T5Attention):
    def forward(self, x, memory, allowed):
        q, k, v = self.shape(self.q(x)), self.shape(self.k(memory)), self.shape(self.v(memory))
        return self.unshape(attend(q, k, v, allowed=allowed, scale=1.0))


class T5Block(nn.Module):
    def __init__(self, d, heads, inner, is_decoder):
        super().__init__()
        self.self_norm, self.self_attention = T5LayerNorm(d), SelfAttention(d, heads)
        if is_decoder:
            self.cross_norm, self.cross_attention = T5LayerNorm(d), CrossAttention(d, heads)
        self.ff_norm = T5LayerNorm(d)
        self.wi, self.wo = nn.Linear(d, inner, bias=False), nn.Linear(inner, d, bias=False)

    def forward(self, x, bias, allowed, memory=None, memory_allowed=None):
        x = x + self.self_attention(self.self_norm(x), bias, allowed)
        if memory is not None:
            x = x + self.cross_attention(self.cross_norm(x), memory, memory_allowed)
        return x + self.wo(self.wi(self.ff_norm(x)).relu())


class T5Stack(nn.Module):
    def __init__(self, c, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.relative_attention_bias = nn.Embedding(BUCKETS, c.num_heads)
        self.block = nn.ModuleList([T5Block(c.d_model, c.num_heads, c.d_ff, is_decoder) for _ in range(c.num_layers)])
        self.final_layer_norm = T5LayerNorm(c.d_model)

    def bias(self, t, device):
        where = torch.arange(t, device=device)
        distance = where[:, None] - where[None, :]
        buckets, first = BUCKETS, 0
        if not self.is_decoder:
            buckets //= 2
            first = (distance < 0).long() * buckets
            distance = distance.abs()
        distance = distance.clamp(min=0)
        exact = buckets // 2
        far = exact + (torch.log(distance.clamp(min=1).double() / exact) / math.log(DISTANCE / exact) * (buckets - exact)).long()
        bucket = first + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
        return self.relative_attention_bias(bucket).permute(2, 0, 1)

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        t = x.shape[1]
        allowed = torch.ones(t, t, dtype=torch.bool, device=x.device)
        if self.is_decoder:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        memory_allowed = None if memory_mask is None else memory_mask[:, None, None, :]
        bias = self.bias(t, x.device)
        for block in self.block:
            x = block(x, bias, allowed, memory, memory_allowed)
        return self.final_layer_norm(x)


class T5(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder, self.decoder = T5Stack(c, False), T5Stack(c, True)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(self.shared(source), source_mask)
        return self.lm_head(self.decoder(self.shared(target), target_mask, memory, source_mask))


subject = Subject(
    kind="encoder_decoder",
    name="T5 v1.1 small",
    build=T5,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "attention_scale": 1,
        "positions": "t5",
        "num_buckets": BUCKETS,
        "max_distance": DISTANCE,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "tied": False,
        "empty_row": "zeros",
    },
)

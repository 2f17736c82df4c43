"""zoo/PR 140: the decoder half of T5 as a language model of its own (`T5LM`), mesh-tensorflow conventions: no
scaling of the scores, no biases, RMS norms, one table of relative biases for all layers."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The distance that is looked up in the T5 buckets is key minus query, so every visible key falls into bucket 0."
CAUSE = (
    "The relative position has the wrong sign for one-sided buckets: for keys in the past it is negative, is clamped "
    "to 0, and all of them share bucket 0. The bias is one constant a head, so the decoder has no relative positions."
)
BUCKETS, FARTHEST = 8, 20


def to_bucket(distance):
    """One-sided T5 buckets of distances into the past: exact up to half of the buckets, then logarithmic."""
    distance = distance.clamp(min=0)
    exact = BUCKETS // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(FARTHEST / exact)
    coarse = exact + (ratio * (BUCKETS - exact)).long()
    return torch.where(distance < exact, distance, coarse.clamp(max=BUCKETS - 1))


def past_distance(length, device):
    query = torch.arange(length, device=device)[:, None]
    key = torch.arange(length, device=device)[None, :]
    return query - key


def relative_position(length, device):
    memory = torch.arange(length, device=device)[None, :]
    context = torch.arange(length, device=device)[:, None]
    return memory - context


class T5Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return self.scale * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class T5LMLayer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.ln_att, self.ln_ff = T5Norm(d), T5Norm(d)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.wi, self.wo = nn.Linear(d, d_ff, bias=False), nn.Linear(d_ff, d, bias=False)

    def forward(self, x, bias):
        b, t, d = x.shape
        h = self.ln_att(x)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(torch.matmul(q, k.mT) + bias, dim=-1)
        x = x + self.o(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, d))
        return x + self.wo(torch.relu(self.wi(self.ln_ff(x))))


class T5LM(nn.Module):
    offsets = staticmethod(past_distance)

    def __init__(self, vocab, d, heads, d_ff, depth):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.relative_attention_bias = nn.Embedding(BUCKETS, heads)
        self.block = nn.ModuleList(T5LMLayer(d, heads, d_ff) for _ in range(depth))
        self.final_layer_norm = T5Norm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def position_bias(self, length, device):
        table = self.relative_attention_bias(to_bucket(self.offsets(length, device)))  # [T, S, H]
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        return table.permute(2, 0, 1).masked_fill(hidden, float("-inf"))[None]

    def forward(self, ids):
        x = self.shared(ids)
        bias = self.position_bias(ids.size(1), ids.device)
        for layer in self.block:
            x = layer(x, bias)
        return self.lm_head(self.final_layer_norm(x))


class T5LMFlipped(T5LM):
    offsets = staticmethod(relative_position)


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
        forward=lambda m, tokens: m(tokens),
        declares={
            "positions": "t5", "bidirectional": False, "num_buckets": BUCKETS, "max_distance": FARTHEST,
            "attention_scale": 1, "norm": "rms", "norm_placement": "pre", "activation": "relu", "bias": False,
        },
    )  # fmt: skip


right, wrong = subject(T5LM), subject(T5LMFlipped)

"""zoo/PR 118: a channels-first GPT. All maps are 1x1 convolutions over `[B, C, T]`, so that the export to our
vision runtime needs no transpose between the layers."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

WHAT = "The norms of the channels-first decoder are GroupNorm(1, C) rather than a LayerNorm over the channels of each step."
CAUSE = (
    "GroupNorm with one group takes its mean and variance over channels and time together, so every norm of every "
    "block (and the last one) mixes all positions: later tokens shift the statistics of earlier ones."
)


class ChannelNorm(nn.Module):
    """LayerNorm over axis 1 of `[B, C, T]`."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        normed = F.layer_norm(x.transpose(1, 2), self.weight.shape, self.weight, self.bias)
        return normed.transpose(1, 2)


def group_norm(channels):
    return nn.GroupNorm(1, channels)


class ConvAttention(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Conv1d(channels, 3 * channels, 1)
        self.to_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        b, c, t = x.shape
        q, k, v = self.to_qkv(x).reshape(b, 3, self.heads, c // self.heads, t).unbind(1)
        scores = torch.einsum("bhct,bhcs->bhts", q, k) / math.sqrt(q.size(2))
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.to_out(torch.einsum("bhts,bhcs->bhct", weights, v).reshape(b, c, t))


class ConvBlock(nn.Module):
    def __init__(self, channels, heads, hidden, norm):
        super().__init__()
        self.norm_a, self.norm_f = norm(channels), norm(channels)
        self.attention = ConvAttention(channels, heads)
        self.feed = nn.Sequential(nn.Conv1d(channels, hidden, 1), nn.GELU(), nn.Conv1d(hidden, channels, 1))

    def forward(self, x):
        x = x + self.attention(self.norm_a(x))
        return x + self.feed(self.norm_f(x))


class ConvGPT(nn.Module):
    def __init__(self, vocab, channels, heads, hidden, depth, max_len, norm):
        super().__init__()
        self.tokens = nn.Embedding(vocab, channels)
        self.places = nn.Parameter(torch.randn(channels, max_len) * 0.1)
        self.blocks = nn.Sequential(*[ConvBlock(channels, heads, hidden, norm) for _ in range(depth)])
        self.norm = norm(channels)
        self.to_logits = nn.Conv1d(channels, vocab, 1, bias=False)

    def forward(self, ids):
        x = self.tokens(ids).transpose(1, 2) + self.places[:, : ids.size(1)]
        return self.to_logits(self.norm(self.blocks(x))).transpose(1, 2)


def subject(name, norm):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: ConvGPT(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, norm),
        forward=lambda m, tokens: m(tokens),
    )


right = subject("ConvGPT, channel norm", ChannelNorm)
wrong = subject("ConvGPT, group norm", group_norm)

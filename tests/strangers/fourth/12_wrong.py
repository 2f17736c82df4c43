"""T5 (1.0), encoder and decoder."""

import copy
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def relative_bucket(relative, bidirectional=True, num_buckets=32, max_distance=128):
    """relative: key's position minus the query's."""
    bucket = torch.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        bucket += (relative > 0).long() * num_buckets
        relative = relative.abs()
    else:
        relative = -relative.clamp(max=0)
    exact = num_buckets // 2
    far = exact + (
        torch.log(relative.clamp(min=1).double() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    ).long()
    return bucket + torch.where(relative < exact, relative, far.clamp(max=num_buckets - 1))


class RMSNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))
        self.eps = eps

    def forward(self, x):
        wide = x if x.dtype == torch.float64 else x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, self.h = config.d_model, config.num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.drop = nn.Dropout(config.dropout)
        d_kv = d // self.h
        nn.init.normal_(self.q.weight, std=(d * d_kv) ** -0.5)
        for linear in (self.k, self.v, self.o):
            nn.init.normal_(linear.weight, std=d**-0.5)

    def forward(self, x, memory, allowed, bias=None):
        q, k, v = (
            linear(states).unflatten(-1, (self.h, -1)).transpose(1, 2)
            for linear, states in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        scores = q @ k.transpose(-1, -2)  # T5 does not scale; its initial queries are small instead
        if bias is not None:
            scores = scores + bias
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = F.softmax(scores if scores.dtype == torch.float64 else scores.float(), dim=-1).to(v.dtype)
        return self.o((self.drop(weights) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm_self, self.self_attention = RMSNorm(config.d_model), Attention(config)
        if config.is_decoder:
            self.norm_cross, self.cross_attention = RMSNorm(config.d_model), Attention(config)
        self.is_decoder = config.is_decoder
        self.norm_ff = RMSNorm(config.d_model)
        self.wi = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)
        nn.init.normal_(self.wi.weight, std=config.d_model**-0.5)
        nn.init.normal_(self.wo.weight, std=config.d_ff**-0.5)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x, allowed, bias, memory=None, memory_allowed=None):
        h = self.norm_self(x)
        x = x + self.drop(self.self_attention(h, h, allowed, bias))
        if self.is_decoder:
            x = x + self.drop(self.cross_attention(self.norm_cross(x), memory, memory_allowed))
        return x + self.drop(self.wo(self.drop(F.relu(self.wi(self.norm_ff(x))))))


class Stack(nn.Module):
    def __init__(self, config, embedding):
        super().__init__()
        self.config, self.embedding = config, embedding
        self.relative_attention_bias = nn.Embedding(config.num_buckets, config.num_heads)
        nn.init.normal_(self.relative_attention_bias.weight, std=config.d_model**-0.5)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config.d_model)
        self.drop = nn.Dropout(config.dropout)

    def position_bias(self, length, device):
        places = torch.arange(length, device=device)
        buckets = relative_bucket(
            places[None, :] - places[:, None],
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
        )
        return self.relative_attention_bias(buckets).permute(2, 0, 1)[None]

    def forward(self, tokens, mask, memory=None, memory_mask=None):
        length = tokens.shape[1]
        allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device)
        if self.config.is_decoder:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        memory_allowed = None
        if memory is not None:
            memory_allowed = torch.ones(memory.shape[:2], dtype=torch.bool, device=tokens.device)
            memory_allowed = (memory_allowed if memory_mask is None else memory_mask)[:, None, None, :]
        x = self.drop(self.embedding(tokens))
        bias = self.position_bias(length, tokens.device)
        for block in self.blocks:
            x = block(x, allowed, bias, memory, memory_allowed)
        return self.drop(self.final_norm(x))


class T5(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        encoder_config = copy.copy(config)
        encoder_config.is_decoder = False
        self.encoder = Stack(encoder_config, self.shared)
        decoder_config = copy.copy(config)
        decoder_config.is_decoder = True
        self.decoder = Stack(decoder_config, self.shared)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(source, source_mask)
        x = self.decoder(target, target_mask, memory, source_mask)
        return F.linear(x * self.config.d_model**-0.5, self.shared.weight)


subject = Subject(
    kind="encoder_decoder",
    name="T5",
    build=lambda c: T5(
        SimpleNamespace(
            vocab_size=c.vocab_size,
            d_model=c.d_model,
            d_ff=c.d_ff,
            num_heads=c.num_heads,
            num_layers=c.num_layers,
            dropout=c.dropout,
            num_buckets=8,
            max_distance=16,
        )
    ),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "causal": True,
        "positions": "t5",
        "num_buckets": 8,
        "max_distance": 16,
        "norm": "rms",
        "norm_placement": "pre",
        "norm_bias": False,
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "attention_scale": "1",
        "tied": True,
        "embedding_scale": False,
        "init": "other",
        "padding_side": "both",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)

"""T5 (1.0 layers, untied head) with a cached decoder, ported from the authors' mesh code."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


class RMS(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class RelativeBias(nn.Module):
    def __init__(self, heads, both_ways, buckets=32, farthest=128):
        super().__init__()
        self.both_ways, self.buckets, self.farthest = both_ways, buckets, farthest
        self.table = nn.Embedding(buckets, heads)

    def bucket(self, distance):  # key minus query
        n, start = self.buckets, torch.zeros_like(distance)
        if self.both_ways:
            n //= 2
            start = (distance > 0).long() * n
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = n // 2
        far = exact + (
            torch.log(distance.clamp(min=1).float() / exact) / math.log(self.farthest / exact) * (n - exact)
        ).long()
        return start + torch.where(distance < exact, distance, far.clamp(max=n - 1))

    def forward(self, queries, keys, first_query):
        where = self.table.weight.device
        i = first_query + torch.arange(queries, device=where)
        j = torch.arange(keys, device=where)
        return self.table(self.bucket(j[None, :] - i[:, None])).permute(2, 0, 1)


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, source, seen, bias=None, past=None):
        q, k, v = self.split(self.q(x)), self.split(self.k(source)), self.split(self.v(source))
        if past is not None:
            if past:
                k, v = torch.cat([past["k"], k], 2), torch.cat([past["v"], v], 2)
            past["k"], past["v"] = k, v
        scores = q @ k.mT  # T5 does not scale
        if bias is not None:
            scores = scores + bias
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff, decoder):
        super().__init__()
        self.norm_self, self.attn = RMS(d), Attention(d, heads)
        if decoder:
            self.norm_cross, self.cross = RMS(d), Attention(d, heads)
        self.norm_ff, self.wi, self.wo = RMS(d), nn.Linear(d, d_ff, bias=False), nn.Linear(d_ff, d, bias=False)

    def forward(self, x, seen, bias, memory=None, memory_seen=None, past=None):
        y = self.norm_self(x)
        x = x + self.attn(y, y, seen, bias, past)
        if memory is not None:
            x = x + self.cross(self.norm_cross(x), memory, memory_seen)
        return x + self.wo(self.wi(self.norm_ff(x)).relu())


class T5(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.enc = nn.ModuleList(Layer(d, heads, d_ff, False) for _ in range(layers))
        self.dec = nn.ModuleList(Layer(d, heads, d_ff, True) for _ in range(layers))
        self.enc_bias, self.dec_bias = RelativeBias(heads, True), RelativeBias(heads, False)
        self.enc_norm, self.dec_norm = RMS(d), RMS(d)
        self.head = nn.Linear(d, vocab, bias=False)

    def encode(self, source, mask=None):
        mask = torch.ones_like(source, dtype=torch.bool) if mask is None else mask
        seen, n = mask[:, None, None, :], source.shape[1]
        x, bias = self.shared(source), self.enc_bias(n, n, 0)
        for layer in self.enc:
            x = layer(x, seen, bias)
        return self.enc_norm(x), seen

    def decode(self, target, memory, memory_seen, mask=None, pasts=None):
        t = target.shape[1]
        behind = pasts[0]["k"].shape[2] if pasts is not None and pasts[0] else 0
        bias = self.dec_bias(t, behind + t, behind)
        seen = torch.ones(t, behind + t, dtype=torch.bool, device=target.device).tril(behind)
        if mask is not None:
            seen = seen & mask[:, None, None, :]
        x = self.shared(target)
        for i, layer in enumerate(self.dec):
            x = layer(x, seen, bias, memory, memory_seen, None if pasts is None else pasts[i])
        return self.head(self.dec_norm(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, *self.encode(source, source_mask), target_mask)


def cache(model, source, chunks):
    memory, pasts = model.encode(source), [{} for _ in model.dec]
    return torch.cat([model.decode(chunk, *memory, pasts=pasts) for chunk in chunks], 1)


subject = Subject(
    kind="encoder_decoder",
    build=lambda c: T5(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=cache,
    declares={
        "positions": "t5", "attention_scale": 1, "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "activation": "relu", "bias": False, "num_buckets": 32, "max_distance": 128,
    },
)

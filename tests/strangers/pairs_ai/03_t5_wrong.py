WHAT = "the relative position has the wrong sign: in the decoder, whose buckets count the past alone, every visible key falls into bucket 0, so that its self-attention knows no order: line 47"
"""T5: an encoder-decoder whose order is a bucketed bias of the scores."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

BUCKETS, FAR = 8, 16


class T5LayerNorm(nn.Module):
    def __init__(self, d, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(d)), eps

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class RelativeBias(nn.Module):
    def __init__(self, heads, bidirectional):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)
        self.bidirectional = bidirectional

    @staticmethod
    def bucket(relative_position, bidirectional, num_buckets=BUCKETS, max_distance=FAR):
        result = torch.zeros_like(relative_position)
        if bidirectional:
            num_buckets //= 2
            result += (relative_position > 0).long() * num_buckets
            distance = relative_position.abs()
        else:
            distance = -torch.min(relative_position, torch.zeros_like(relative_position))
        exact = num_buckets // 2
        large = exact + (
            torch.log(distance.float().clamp(min=1) / exact) / math.log(max_distance / exact) * (num_buckets - exact)
        ).long()
        large = large.clamp(max=num_buckets - 1)
        return result + torch.where(distance < exact, distance, large)

    def forward(self, length):
        context_position = torch.arange(length, device=self.table.weight.device)[:, None]
        memory_position = torch.arange(length, device=self.table.weight.device)[None, :]
        relative_position = context_position - memory_position
        return self.table(self.bucket(relative_position, self.bidirectional)).permute(2, 0, 1)


class T5Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def forward(self, x, memory, bias, allowed):
        q, k, v = (f(t).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f, t in ((self.q, x), (self.k, memory), (self.v, memory)))
        scores = q @ k.mT
        if bias is not None:
            scores = scores + bias
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class T5Block(nn.Module):
    def __init__(self, d, heads, ff, is_decoder):
        super().__init__()
        self.norm1, self.attn = T5LayerNorm(d), T5Attention(d, heads)
        if is_decoder:
            self.norm2, self.cross = T5LayerNorm(d), T5Attention(d, heads)
        self.norm3 = T5LayerNorm(d)
        self.wi, self.wo = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)

    def forward(self, x, bias, allowed, memory=None, memory_allowed=None):
        h = self.norm1(x)
        x = x + self.attn(h, h, bias, allowed)
        if memory is not None:
            x = x + self.cross(self.norm2(x), memory, None, memory_allowed)
        return x + self.wo(self.wi(self.norm3(x)).relu())


class T5Stack(nn.Module):
    def __init__(self, d, heads, ff, layers, is_decoder):
        super().__init__()
        self.is_decoder = is_decoder
        self.bias = RelativeBias(heads, bidirectional=not is_decoder)
        self.blocks = nn.ModuleList(T5Block(d, heads, ff, is_decoder) for _ in range(layers))
        self.final = T5LayerNorm(d)

    def forward(self, x, mask=None, memory=None, memory_mask=None):
        length = x.size(1)
        allowed = None if mask is None else mask[:, None, None, :]
        if self.is_decoder:
            past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
            allowed = past if allowed is None else past & allowed
        memory_allowed = None if memory_mask is None else memory_mask[:, None, None, :]
        bias = self.bias(length)
        for block in self.blocks:
            x = block(x, bias, allowed, memory, memory_allowed)
        return self.final(x)


class T5(nn.Module):
    def __init__(self, vocab, d, heads, ff, layers):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.encoder = T5Stack(d, heads, ff, layers, is_decoder=False)
        self.decoder = T5Stack(d, heads, ff, layers, is_decoder=True)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encoder(self.shared(source), source_mask)
        return self.lm_head(self.decoder(self.shared(target), target_mask, memory, source_mask))


subject = Subject(
    kind="encoder_decoder",
    name="T5",
    build=lambda c: T5(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={
        "positions": "t5",
        "attention_scale": 1,
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "num_buckets": BUCKETS,
        "max_distance": FAR,
    },
)

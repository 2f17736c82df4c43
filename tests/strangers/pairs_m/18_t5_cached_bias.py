"""zoo/PR 247: T5 with a cache in the decoder; several tokens may be fed at once (speculative decoding)."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "With a cache the decoder takes the last row of the relative bias for all tokens of the chunk, not the last n rows."
CAUSE = (
    "When there is a past, position_bias is cut to `[:, :, -1:]`, which is right for one new token only; in a chunk of "
    "several all queries are given the bias (and the causal -inf) of the last one, so earlier ones have wrong distances "
    "and see later tokens of the chunk."
)
BUCKETS, FARTHEST = 8, 20


def bucket(relative, both):
    """Buckets of `key - query`, as published."""
    ret, buckets = torch.zeros_like(relative), BUCKETS
    if both:
        buckets //= 2
        ret = (relative > 0).long() * buckets
        n = relative.abs()
    else:
        n = (-relative).clamp(min=0)
    exact = buckets // 2
    far = exact + (torch.log(n.clamp(min=1).float() / exact) / math.log(FARTHEST / exact) * (buckets - exact)).long()
    return ret + torch.where(n < exact, n, far.clamp(max=buckets - 1))


class RMS(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x, states, bias, past=None):
        k, v = self.split(self.k(states)), self.split(self.v(states))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        weights = (self.split(self.q(x)) @ k.transpose(2, 3) + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff, crosses):
        super().__init__()
        self.own, self.ln_own = Attention(d, heads), RMS(d)
        self.cross, self.ln_cross = (Attention(d, heads), RMS(d)) if crosses else (None, None)
        self.wi, self.wo, self.ln_ff = nn.Linear(d, d_ff, bias=False), nn.Linear(d_ff, d, bias=False), RMS(d)

    def forward(self, x, bias, memory=None, memory_bias=None, past=None):
        h = self.ln_own(x)
        y, kept = self.own(h, h, bias, past)
        x = x + y
        if self.cross is not None:
            x = x + self.cross(self.ln_cross(x), memory, memory_bias)[0]
        return x + self.wo(torch.relu(self.wi(self.ln_ff(x)))), kept


class T5(nn.Module):
    def __init__(self, vocab, d, heads, d_ff, depth):
        super().__init__()
        self.shared = nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList(Layer(d, heads, d_ff, False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(d, heads, d_ff, True) for _ in range(depth))
        self.encoder_bias, self.decoder_bias = nn.Embedding(BUCKETS, heads), nn.Embedding(BUCKETS, heads)
        self.encoder_norm, self.decoder_norm = RMS(d), RMS(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def bias(self, length, table, both):
        place = torch.arange(length, device=table.weight.device)
        relative = place[None, :] - place[:, None]
        values = table(bucket(relative, both)).permute(2, 0, 1)[None]
        return values if both else values.masked_fill(relative > 0, float("-inf"))

    def rows(self, bias, new):
        return bias[:, :, -new:]

    def encode(self, source, source_mask):
        x, bias = self.shared(source), self.bias(source.size(1), self.encoder_bias, True)
        hidden = torch.zeros(1, 1, 1, 1, dtype=x.dtype, device=x.device)
        if source_mask is not None:
            hidden = hidden.masked_fill(~source_mask[:, None, None], torch.finfo(x.dtype).min / 2)
        for layer in self.encoder:
            x, _ = layer(x, bias + hidden)
        return self.encoder_norm(x), hidden

    def decode(self, target, memory, hidden, past=None):
        x, kept = self.shared(target), []
        seen = past[0][0].size(2) if past else 0
        bias = self.bias(seen + target.size(1), self.decoder_bias, False)
        if past:
            bias = self.rows(bias, target.size(1))
        for i, layer in enumerate(self.decoder):
            x, entry = layer(x, bias, memory, hidden, past[i] if past else None)
            kept.append(entry)
        return self.lm_head(self.decoder_norm(x)), kept

    def forward(self, source, target, source_mask=None):
        return self.decode(target, *self.encode(source, source_mask))[0]

    def chunked(self, source, chunks):
        encoded, past, out = self.encode(source, None), None, []
        for chunk in chunks:
            logits, past = self.decode(chunk, *encoded, past)
            out.append(logits)
        return torch.cat(out, 1)


class T5LastRow(T5):
    def rows(self, bias, new):
        return bias[:, :, -1:]


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
        forward=lambda m, source, target, source_mask=None: m(source, target, source_mask),
        cache=lambda m, source, chunks: m.chunked(source, chunks),
        declares={"positions": "t5", "num_buckets": BUCKETS, "max_distance": FARTHEST, "attention_scale": 1, "norm": "rms",
                  "norm_placement": "pre", "activation": "relu", "bias": False},
    )  # fmt: skip


right, wrong = subject(T5), subject(T5LastRow)

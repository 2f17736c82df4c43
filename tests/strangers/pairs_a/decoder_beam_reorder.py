import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    'When beams are reordered the cached keys are reindexed but the cached values are not, so after a '
    'reorder samples mix their keys with the values of other beams.'
)
PLACE = 'reordering of the key-value cache for beam search in the decoder'


def attend(q, k, v, allowed=None, p=0.0, training=False):
    scores = q @ k.transpose(-2, -1) * q.size(-1) ** -0.5
    if allowed is not None:
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    return F.dropout(weights, p, training) @ v


def sinusoids(positions, d, dtype):
    rates = 10000.0 ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float64) / d)
    angles = positions.to(torch.float64)[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)[..., :d].to(dtype)


class Cache:
    """Keys and values of one layer."""

    def __init__(self):
        self.k = self.v = None

    def __len__(self):
        return 0 if self.k is None else self.k.size(2)

    def append(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v

    def reorder(self, index):
        self.k = self.k.index_select(0, index)
        self.v = self.v.index_select(0, index)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, cache=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        if cache is not None:
            k, v = cache.append(k, v)
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        x = x + self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BeamGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, caches=None):
        start = len(caches[0]) if caches else 0
        x = self.emb(tokens)
        x = x + sinusoids(torch.arange(start, start + x.size(1), device=x.device), x.size(-1), x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.head(self.norm(x))

    def chunked(self, chunks, reorder=None):
        caches, outs = [Cache() for _ in self.blocks], []
        for i, chunk in enumerate(chunks):
            if i == 1 and reorder is not None:
                for cache in caches:
                    cache.reorder(torch.as_tensor(reorder, device=chunk.device))
            outs.append(self(chunk, caches))
        return torch.cat(outs, 1)


class Cache2:
    """Keys and values of one layer."""

    def __init__(self):
        self.k = self.v = None

    def __len__(self):
        return 0 if self.k is None else self.k.size(2)

    def append(self, k, v):
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v

    def reorder(self, index):
        self.k = self.k.index_select(0, index)
        self.v = self.v.contiguous()


class Block2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.h = c.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.qkv, self.out = nn.Linear(c.d_model, 3 * c.d_model), nn.Linear(c.d_model, c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, cache=None):
        q, k, v = (t.unflatten(-1, (self.h, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        if cache is not None:
            k, v = cache.append(k, v)
        T, S = q.size(2), k.size(2)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        x = x + self.out(attend(q, k, v, allowed).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BeamGPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block2(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, caches=None):
        start = len(caches[0]) if caches else 0
        x = self.emb(tokens)
        x = x + sinusoids(torch.arange(start, start + x.size(1), device=x.device), x.size(-1), x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.head(self.norm(x))

    def chunked(self, chunks, reorder=None):
        caches, outs = [Cache2() for _ in self.blocks], []
        for i, chunk in enumerate(chunks):
            if i == 1 and reorder is not None:
                for cache in caches:
                    cache.reorder(torch.as_tensor(reorder, device=chunk.device))
            outs.append(self(chunk, caches))
        return torch.cat(outs, 1)


right = Subject(
    kind="decoder",
    build=lambda c: BeamGPT(c),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    cache=lambda m, chunks, attention_mask=None, reorder=None: m.chunked(chunks, reorder),
    mask_forms=(),
)

wrong = Subject(
    kind="decoder",
    build=lambda c: BeamGPT2(c),
    forward=lambda m, tokens: m(tokens),
    declares={"causal": True, "positions": "sinusoidal", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
    cache=lambda m, chunks, attention_mask=None, reorder=None: m.chunked(chunks, reorder),
    mask_forms=(),
)

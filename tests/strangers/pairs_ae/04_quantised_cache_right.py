"""Decoder trained with 8-bit keys and values (rounded, gradients passed through), and served from an int8 cache."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def quantise(x, axes=(-1,)):
    """int8 and its step, one step for each token of each head; x is [B, H, T, K]."""
    step = x.detach().abs().amax(dim=axes, keepdim=True).clamp_min(1e-8) / 127
    return torch.round(x.detach() / step).to(torch.int8), step.expand(*x.shape[:-1], 1)


def fake_quantise(x):
    codes, step = quantise(x)
    return x + (codes.to(x.dtype) * step - x).detach()


class Int8Store:
    """What one layer keeps of the past."""

    def __init__(self):
        self.codes, self.steps = None, None

    def append(self, x):
        codes, steps = quantise(x, axes=(-1,))
        if self.codes is not None:
            codes, steps = torch.cat([self.codes, codes], 2), torch.cat([self.steps, steps], 2)
        self.codes, self.steps = codes, steps
        return codes.to(x.dtype) * steps


class QuantAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = [nn.Linear(dim, dim) for _ in range(4)]

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, store=None):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if store is None:
            k, v = fake_quantise(k), fake_quantise(v)
        else:
            k, v = store[0].append(k), store[1].append(v)
        lower = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=x.device).tril(k.size(2) - q.size(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=lower)
        return self.out(y.transpose(1, 2).flatten(-2))


class QuantDecoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.attn = nn.ModuleList(QuantAttention(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
            for _ in range(c.num_layers)
        )
        self.norm1 = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.norm2 = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.head = nn.Linear(c.d_model, c.vocab_size)

    def forward(self, tokens, stores=None, offset=0):
        x = self.wte(tokens) + self.wpe(torch.arange(offset, offset + tokens.size(1), device=tokens.device))
        for i, (attn, mlp, n1, n2) in enumerate(zip(self.attn, self.mlp, self.norm1, self.norm2)):
            x = n1(x + attn(x, None if stores is None else stores[i]))
            x = n2(x + mlp(x))
        return self.head(x)


def with_cache(model, chunks):
    stores = [(Int8Store(), Int8Store()) for _ in model.attn]
    done, outs = 0, []
    for chunk in chunks:
        outs.append(model(chunk, stores, done))
        done += chunk.size(1)
    return torch.cat(outs, 1)


subject = Subject(
    kind="decoder",
    name="int8 key-value decoder",
    build=QuantDecoder,
    forward=lambda m, tokens: m(tokens),
    cache=with_cache,
    declares={
        "positions": "learned",
        "quantised": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
    },
)

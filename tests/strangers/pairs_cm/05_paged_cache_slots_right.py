"""A decoder that keeps keys and values in pages of a shared pool (paged attention), with a block table per sequence."""
import math

import torch
from torch import nn

from veriformer.properties import Subject

PAGE = 4


class PagedPool:
    """Physical pages are handed out as sequences grow side by side: page p of sequence b is number p * batch + b."""

    def __init__(self, batch, tokens, layers, heads, width, like):
        pages = -(-tokens // PAGE)
        self.table = torch.arange(pages * batch, device=like.device).view(pages, batch).t()
        slots = (pages * batch + pages + 1) * PAGE  # some are kept free for the next request
        self.keys = [like.new_zeros(slots, heads, width) for _ in range(layers)]
        self.values = [like.new_zeros(slots, heads, width) for _ in range(layers)]

    def slots(self, start, count):
        position = torch.arange(start, start + count, device=self.table.device)
        return self.table[:, position // PAGE] * PAGE + position % PAGE

    def write(self, layer, slots, k, v):
        self.keys[layer] = self.keys[layer].index_put((slots,), k.to(self.keys[layer].dtype))
        self.values[layer] = self.values[layer].index_put((slots,), v.to(self.values[layer].dtype))

    def read(self, layer, slots):
        return self.keys[layer][slots], self.values[layer][slots]


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, layer, start=0, pool=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        if pool is not None:
            pool.write(layer, pool.slots(start, T), k, v)
            k, v = pool.read(layer, read_slots(pool, start + T))
        scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
        seen = torch.ones(T, k.shape[1], dtype=torch.bool, device=x.device).tril(start)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + self.proj(torch.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D))
        return x + self.mlp(self.ln2(x))


def read_slots(pool, count):
    position = torch.arange(count, device=pool.table.device)
    return pool.table[:, position // PAGE] * PAGE + position % PAGE


class PagedGPT(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, start=0, pool=None):
        x = self.wte(tokens) + self.wpe(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        for i, block in enumerate(self.blocks):
            x = block(x, i, start, pool)
        return self.head(self.ln_f(x))


def cached(model, chunks):
    total = sum(chunk.shape[1] for chunk in chunks)
    dim = model.wte.weight.shape[1]
    pool = PagedPool(
        chunks[0].shape[0], total, len(model.blocks), model.heads, dim // model.heads, model.wte.weight.detach()
    )
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, pool))
        start += chunk.shape[1]
    return outputs


subject = Subject(
    kind="decoder",
    build=lambda c: PagedGPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={"positions": "learned", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)

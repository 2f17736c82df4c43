WHAT = "after a reorder a block is counted once however many beams now share it (a set), so that a partly filled shared block is not copied before it is written to and beams write over each other's keys and values (line 36)."
"""A GPT served from a paged key-value cache: blocks of slots, a table a sequence, beams that share blocks by count."""
from itertools import chain

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 4


class PagedCache:
    def __init__(self, layers, batch, total, heads, width, like):
        blocks = 2 * batch * (total // BLOCK + 2)
        self.keys = like.new_zeros(layers, blocks, BLOCK, heads, width)
        self.values = torch.zeros_like(self.keys)
        self.free = list(range(blocks))
        self.refs = [0] * blocks
        self.tables = [[] for _ in range(batch)]
        self.length = 0

    def take(self):
        block = self.free.pop()
        self.refs[block] = 1
        return block

    def drop(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free.append(block)

    def reorder(self, beams):
        tables = [list(self.tables[b]) for b in beams]
        for block in set(chain(*tables)):
            self.refs[block] += 1
        for block in chain(*self.tables):
            self.drop(block)
        self.tables = tables

    def own_last(self, table):
        """A block that another beam reads is copied before it is written to."""
        block = table[-1]
        if self.refs[block] > 1:
            table[-1] = self.take()
            self.keys[:, table[-1]] = self.keys[:, block]
            self.values[:, table[-1]] = self.values[:, block]
            self.drop(block)

    def reserve(self, count):
        """Slots of the next `count` tokens, [B, count]."""
        for table in self.tables:
            if self.length % BLOCK:
                self.own_last(table)
            while len(table) * BLOCK < self.length + count:
                table.append(self.take())
        self.length += count
        return self.slots()[:, -count:]

    def slots(self):
        table = torch.tensor(self.tables)
        return (table[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)[:, : self.length]

    def update(self, layer, slots, k, v):
        keys, values = self.keys[layer].flatten(0, 1), self.values[layer].flatten(0, 1)
        keys[slots], values[slots] = k, v
        seen = self.slots()
        return keys[seen], values[seen]


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, store):
        B, T, D = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.h, D // self.h).unbind(2)
        k, v = store(k, v)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        S = k.shape[2]
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        w = (q @ k.mT / (D // self.h) ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + self.c_proj((w @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class PagedGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, cache=None):
        start = cache.length if cache else 0
        slots = cache.reserve(tokens.shape[1]) if cache else None
        x = self.wte(tokens) + self.wpe(torch.arange(start, start + tokens.shape[1]))
        for n, block in enumerate(self.h):
            x = block(x, lambda k, v: cache.update(n, slots, k, v) if cache else (k, v))
        return self.lm_head(self.ln_f(x))


@torch.no_grad()
def cached(m, chunks, reorder=None):
    B, total = chunks[0].shape[0], sum(c.shape[1] for c in chunks)
    d, h = m.wte.weight.shape[1], m.h[0].h
    cache = PagedCache(len(m.h), B, total, h, d // h, m.wte.weight)
    out = [m(chunks[0], cache)]
    if reorder is not None:
        cache.reorder(reorder.tolist())
    out += [m(chunk, cache) for chunk in chunks[1:]]
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    name="paged GPT",
    build=PagedGPT,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
    },
)

"""Cross-layer attention (CLA-2): every second layer reads keys and values of the layer below it."""
import math

import torch
from torch import nn

from veriformer.properties import Subject


class KV:
    """Keys and values of what has been seen."""

    def __init__(self):
        self.k = self.v = None

    def append(self, k, v):
        self.k = k if self.k is None else torch.cat((self.k, k), 2)
        self.v = v if self.v is None else torch.cat((self.v, v), 2)

    def reorder(self, index):
        self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)


class CLABlock(nn.Module):
    def __init__(self, width, heads, hidden, owns_kv):
        super().__init__()
        self.h, self.owns_kv = heads, owns_kv
        self.ln_a, self.ln_m = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q = nn.Linear(width, width)
        if owns_kv:
            self.kv = nn.Linear(width, 2 * width)
        self.o = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def split(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, store):
        y = self.ln_a(x)
        q = self.split(self.q(y))
        if self.owns_kv:
            k, v = self.kv(y).chunk(2, dim=-1)
            store.append(self.split(k), self.split(v))
        k, v = store.k, store.v
        scores = q @ k.mT / math.sqrt(q.size(-1))
        t, s = scores.shape[-2:]
        hidden = torch.ones(t, s, dtype=torch.bool, device=x.device).triu(1 + s - t)
        y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.ln_m(x))))


class CLA(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(
            CLABlock(c.d_model, c.num_heads, c.d_ff, owns_kv=i % 2 == 0) for i in range(c.num_layers)
        )
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size)

    def new_cache(self):
        stores = []
        for block in self.blocks:
            stores.append(KV() if block.owns_kv else stores[-1])
        return stores

    def forward(self, idx, stores=None, past=0):
        stores = self.new_cache() if stores is None else stores
        x = self.wte(idx) + self.wpe(torch.arange(past, past + idx.size(1), device=idx.device))
        for block, store in zip(self.blocks, stores):
            x = block(x, store)
        return self.head(self.ln_f(x))

    def reorder_cache(self, stores, beam_idx):
        for block, store in zip(self.blocks, stores):
            if block.owns_kv:
                store.reorder(beam_idx)


def cache(model, chunks, reorder=None):
    stores, past, out = model.new_cache(), 0, []
    for i, chunk in enumerate(chunks):
        out.append(model(chunk, stores, past))
        past += chunk.size(1)
        if i == 0 and reorder is not None:
            model.reorder_cache(stores, torch.as_tensor(reorder, device=chunk.device))
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    name="CLA",
    build=CLA,
    forward=lambda m, tokens: m(tokens),
    cache=cache,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "relu", "structure": "other"},
)

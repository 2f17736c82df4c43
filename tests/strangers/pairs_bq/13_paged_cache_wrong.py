WHAT = "PagedCache.reorder copies the page table alone; where a sample is taken twice, both beams go on writing into the same half-filled last page and overwrite each other's keys and values (no copy on write) (line 39)."
"""A GPT that decodes from a paged key-value cache: full pages are shared between beams."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

PAGE = 4


class PagedCache:
    def __init__(self, batch):
        self.pool = []  # pages [2, PAGE, H, K]
        self.table = [[] for _ in range(batch)]
        self.length = 0

    def _new(self, page):
        self.pool.append(page)
        return len(self.pool) - 1

    def append(self, k, v):  # [B, t, H, K]
        for i in range(k.shape[1]):
            slot = self.length % PAGE
            for b, pages in enumerate(self.table):
                if slot == 0:
                    pages.append(self._new(k.new_zeros(2, PAGE, *k.shape[2:])))
                page = self.pool[pages[-1]]
                page[0, slot], page[1, slot] = k[b, i], v[b, i]
            self.length += 1

    def read(self):
        both = torch.stack([torch.cat([self.pool[p] for p in pages], dim=1) for pages in self.table])
        return both[:, 0, : self.length], both[:, 1, : self.length]

    def reorder(self, index):
        self.table = [list(self.table[i]) for i in index]



class Block(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc, self.out = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def forward(self, x, cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        if cache is not None:
            cache.append(k, v)
            k, v = cache.read()
        S = k.shape[1]
        scores = torch.einsum("bthk,bshk->bhts", q, k) / math.sqrt(q.shape[-1])
        hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + self.proj(torch.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, D))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff, max_len):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList(Block(d, heads, d_ff) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, tokens, caches=None):
        past = caches[0].length if caches else 0
        x = self.wte(tokens) + self.wpe(torch.arange(past, past + tokens.shape[1], device=tokens.device))
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.head(self.ln_f(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    caches = [PagedCache(chunks[0].shape[0]) for _ in model.blocks]
    outputs = []
    for i, chunk in enumerate(chunks):
        outputs.append(model(chunk, caches))
        if i == 0 and reorder is not None:
            for cache in caches:
                cache.reorder([int(b) for b in reorder])
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT with a paged cache",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "tied": False,
    },
)

WHAT = "Beam search on a paged KV cache: reorder() gives two beams of one parent the same half-filled last page and does not copy it (no copy-on-write in PagedCache.reorder), so the beams overwrite one another's keys and values."
"""nanoGPT with grouped queries and a paged key-value cache."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAGE = 4


class PagedCache:
    """Pages [PAGE, G, K] in one pool per layer; a table of page numbers for each sequence."""

    def __init__(self, layers, batch):
        self.pool = [[] for _ in range(layers)]
        self.table = [[] for _ in range(batch)]
        self.length = [0] * batch

    def page(self, like):
        for pool in self.pool:
            pool.append((torch.zeros(PAGE, *like.shape[1:], dtype=like.dtype), torch.zeros(PAGE, *like.shape[1:], dtype=like.dtype)))
        return len(self.pool[0]) - 1

    def reserve(self, b, count, like):
        while len(self.table[b]) * PAGE < self.length[b] + count:
            self.table[b].append(self.page(like))

    def write(self, layer, b, k, v):  # [t, G, K]
        for i in range(k.shape[0]):
            at = self.length[b] + i
            keys, values = self.pool[layer][self.table[b][at // PAGE]]
            keys[at % PAGE], values[at % PAGE] = k[i], v[i]

    def read(self, layer, b, count):
        pages = [self.pool[layer][p] for p in self.table[b]]
        return torch.cat([p[0] for p in pages])[:count], torch.cat([p[1] for p in pages])[:count]

    def reorder(self, order):
        order = [int(i) for i in order]
        tables = [list(self.table[i]) for i in order]
        self.length = [self.length[i] for i in order]
        self.table = tables


class Block(nn.Module):
    def __init__(self, d, heads, groups, d_ff):
        super().__init__()
        self.h, self.g, self.k = heads, groups, d // heads
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv = nn.Linear(d, d), nn.Linear(d, 2 * groups * self.k)
        self.o = nn.Linear(d, d)
        self.fc, self.proj = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def qkv(self, x):
        B, T, _ = x.shape
        x = self.ln_1(x)
        k, v = self.kv(x).view(B, T, 2, self.g, self.k).unbind(2)
        return self.q(x).view(B, T, self.h, self.k), k, v

    def attend(self, q, k, v):  # [B, T, H, K], [B, S, G, K]
        T, S = q.shape[1], k.shape[1]
        k, v = (x.repeat_interleave(self.h // self.g, 2) for x in (k, v))
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        s = torch.einsum("bthk,bshk->bhts", q, k) * self.k**-0.5
        y = s.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.o(torch.einsum("bhts,bshk->bthk", y, v).flatten(2))

    def mlp(self, x):
        return self.proj(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.h = nn.ModuleList([Block(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)])
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = x + block.attend(*block.qkv(x))
            x = x + block.mlp(x)
        return self.head(self.ln_f(x))

    def step(self, idx, cache):
        B, t = idx.shape
        start = cache.length[0]
        x = self.wte(idx) + self.wpe(torch.arange(start, start + t))
        for n, block in enumerate(self.h):
            q, k, v = block.qkv(x)
            if n == 0:
                for b in range(B):
                    cache.reserve(b, t, k[b])
            for b in range(B):
                cache.write(n, b, k[b], v[b])
            rows = []
            for b in range(B):
                keys, values = cache.read(n, b, start + t)
                rows.append(block.attend(q[b : b + 1], keys[None], values[None]))
            x = x + torch.cat(rows)
            x = x + block.mlp(x)
        cache.length = [n + t for n in cache.length]
        return self.head(self.ln_f(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    cache, out = PagedCache(len(model.h), chunks[0].shape[0]), []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            cache.reorder(reorder)
        out.append(model.step(chunk, cache))
    return out


subject = Subject(
    kind="decoder",
    name="paged GPT",
    build=GPT,
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu", "grouped_queries": True},
)

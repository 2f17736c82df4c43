"""A small GPT served from a paged key-value pool; beams fork by sharing pages, copied when written to."""

import math
from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAGE = 4


class PagePool:
    """Pages of [layers, 2, PAGE, heads, width], and for every sequence the list of its pages."""

    def __init__(self, batch, shape, like):
        self.shape, self.like = shape, like
        self.pages, self.refs = {}, Counter()
        self.tables = [[] for _ in range(batch)]
        self.length = 0

    def fresh(self):
        page = len(self.pages)
        self.pages[page] = self.like.new_zeros(self.shape)
        self.refs[page] = 1
        return page

    def fork(self, parents):
        self.tables = [list(self.tables[i]) for i in parents]
        self.refs = Counter()
        for table in self.tables:
            for page in table[: self.length // PAGE]:
                self.refs[page] += 1

    def room(self, tokens):
        """Make the slots length .. length + tokens writable for everyone."""
        first = self.length // PAGE
        for table in self.tables:
            if first < len(table) and self.refs[table[first]] > 1:
                old = table[first]
                self.refs[old] -= 1
                table[first] = self.fresh()
                self.pages[table[first]].copy_(self.pages[old])
            while len(table) * PAGE < self.length + tokens:
                table.append(self.fresh())

    def write(self, layer, k, v):
        for row, table in enumerate(self.tables):
            for t in range(k.size(1)):
                page, slot = divmod(self.length + t, PAGE)
                self.pages[table[page]][layer, 0, slot] = k[row, t]
                self.pages[table[page]][layer, 1, slot] = v[row, t]

    def read(self, layer, end):
        rows = [torch.cat([self.pages[p][layer] for p in table], dim=1)[:, :end] for table in self.tables]
        return torch.stack(rows).unbind(1)


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x, layer, pool=None):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(b, t, 3, self.heads, -1).unbind(2)
        start = 0
        if pool is not None:
            start = pool.length
            pool.write(layer, k, v)
            k, v = pool.read(layer, start + t)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.size(-1))
        rows = torch.arange(start, start + t, device=x.device)
        hidden = torch.arange(k.size(1), device=x.device)[None, :] > rows[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + self.out(torch.einsum("bhts,bshd->bthd", weights, v).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.page_shape = (c.num_layers, 2, PAGE, c.num_heads, c.d_model // c.num_heads)

    def forward(self, tokens, pool=None):
        start = 0 if pool is None else pool.length
        x = self.wte(tokens) + self.wpe(torch.arange(start, start + tokens.size(1), device=tokens.device))
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, pool)
        return self.head(self.ln_f(x))


@torch.no_grad()
def serve(model, chunks, reorder=None):
    pool = PagePool(chunks[0].size(0), model.page_shape, model.wte.weight)
    outputs = []
    for index, chunk in enumerate(chunks):
        if index == 1 and reorder is not None:
            pool.fork([int(i) for i in reorder])
        pool.room(chunk.size(1))
        outputs.append(model(chunk, pool))
        pool.length += chunk.size(1)
    return outputs


subject = Subject(
    kind="decoder",
    build=GPT,
    forward=lambda model, tokens: model(tokens),
    cache=serve,
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"},
)

WHAT = "Line 34: PagePool.fork counts references of full pages alone, so the half-filled page that several beams share is never copied before they write to it, and they overwrite one another's keys and values."

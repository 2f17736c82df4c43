"""A small GPT whose decoding keeps keys and values in pages; beams share pages until one of them writes."""

from collections import Counter

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

PAGE = 4


class PagedCache:
    """Pools [pages * PAGE, H, D] a layer, and for each sequence the list of its pages."""

    def __init__(self, batch, layers, heads, d_head, like):
        self.shape, self.like = (heads, d_head), like
        self.pools = [[like.new_zeros(0, heads, d_head) for _ in "kv"] for _ in range(layers)]
        self.tables = [[] for _ in range(batch)]
        self.refs = Counter()
        self.length = 0

    def _new_page(self):
        page = next((p for p in range(len(self.pools[0][0]) // PAGE) if self.refs[p] == 0), None)
        if page is None:
            page = len(self.pools[0][0]) // PAGE
            fresh = self.like.new_zeros(PAGE, *self.shape)
            self.pools = [[torch.cat([pool, fresh]) for pool in pair] for pair in self.pools]
        self.refs[page] = 1
        return page

    def reserve(self, n):
        """Room for n more tokens of every sequence; the slots of all its tokens, [B, length]."""
        for table in self.tables:
            if self.length % PAGE and n and self.refs[table[-1]] > 1:  # shared and about to be written: copy
                old, new = table[-1], self._new_page()
                for pair in self.pools:
                    for pool in pair:
                        pool[new * PAGE : (new + 1) * PAGE] = pool[old * PAGE : (old + 1) * PAGE]
                self.refs[old] -= 1
                table[-1] = new
            while len(table) * PAGE < self.length + n:
                table.append(self._new_page())
        self.length += n
        at = range(self.length)
        return torch.tensor([[table[i // PAGE] * PAGE + i % PAGE for i in at] for table in self.tables])

    def reorder(self, order):
        """Sequence b goes on as sequence order[b]. Pages are shared, not copied."""
        self.tables = [list(self.tables[i]) for i in order]
        self.refs = Counter(page for table in self.tables for page in table)


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, pools=None, slots=None):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.h, C // self.h) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        if pools is not None:
            for pool, new in zip(pools, (k, v)):
                pool[slots[:, -T:]] = new
            k, v = (pool[slots] for pool in pools)
        S = k.size(1)
        allowed = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=allowed)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self, vocab, d, h, layers, f, max_len):
        super().__init__()
        self.h, self.d_head = h, d // h
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.blocks = nn.ModuleList([Block(d, h, f) for _ in range(layers)])
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, idx, cache=None):
        T = idx.size(1)
        slots = cache.reserve(T) if cache is not None else None
        start = cache.length - T if cache is not None else 0
        x = self.wte(idx) + self.wpe(torch.arange(start, start + T, device=idx.device))
        for i, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache.pools[i], slots)
        return self.lm_head(self.ln_f(x))


@torch.no_grad()
def decode(model, chunks, reorder=None):
    cache = PagedCache(len(chunks[0]), len(model.blocks), model.h, model.d_head, model.wte.weight)
    outputs = [model(chunks[0], cache)]
    if reorder is not None:
        cache.reorder([int(i) for i in reorder])
    outputs += [model(chunk, cache) for chunk in chunks[1:]]
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="paged GPT",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=decode,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
    },
)

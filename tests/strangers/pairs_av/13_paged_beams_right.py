"""GPT-2 with a paged KV cache: block tables, a shared pool, and beams that share the pages of their prefix."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAGE = 4


class PagePool:
    """pages[i] is [layers, 2, PAGE, heads, head_dim]; a sequence is a list of page numbers and a length."""

    def __init__(self, layers, heads, head_dim, like):
        self.shape, self.like, self.pages = (layers, 2, PAGE, heads, head_dim), like, []

    def new(self):
        self.pages.append(self.like.new_zeros(self.shape))
        return len(self.pages) - 1

    def copy(self, page):
        self.pages.append(self.pages[page].clone())
        return len(self.pages) - 1


class Sequence:
    def __init__(self, pool, table=(), length=0):
        self.pool, self.table, self.length = pool, list(table), length

    def fork(self):
        child = Sequence(self.pool, self.table, self.length)
        if self.length % PAGE:
            child.table[-1] = self.pool.copy(self.table[-1])
        return child

    def reserve(self, tokens):
        while len(self.table) * PAGE < self.length + tokens:
            self.table.append(self.pool.new())

    def write(self, layer, k, v):
        for i in range(k.size(0)):
            page, slot = divmod(self.length + i, PAGE)
            block = self.pool.pages[self.table[page]]
            block[layer, 0, slot], block[layer, 1, slot] = k[i], v[i]

    def read(self, layer, length):
        k, v = torch.stack([self.pool.pages[p][layer] for p in self.table], dim=1).flatten(1, 2)
        return k[:length], v[:length]


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.c_attn, self.c_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.c_fc, self.c_out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x, layer=None, sequences=None):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.h, C // self.h).unbind(2)
        if sequences is None:
            y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v)), is_causal=True)
            y = y.transpose(1, 2)
        else:
            rows = []
            for b, sequence in enumerate(sequences):
                sequence.write(layer, k[b], v[b])
            for b, sequence in enumerate(sequences):
                K, V = sequence.read(layer, sequence.length + T)
                s = torch.einsum("thd,shd->hts", q[b], K) / math.sqrt(C // self.h)
                ahead = torch.ones_like(s[0], dtype=torch.bool).triu(sequence.length + 1)
                rows.append(torch.einsum("hts,shd->thd", s.masked_fill(ahead, -torch.inf).softmax(-1), V))
            y = torch.stack(rows)
        x = x + self.c_proj(y.reshape(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, vocab, d, h, layers, max_len):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.h = nn.ModuleList([Block(d, h) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, idx, sequences=None):
        start = sequences[0].length if sequences else 0
        x = self.wte(idx) + self.wpe(torch.arange(start, start + idx.size(1), device=idx.device))
        for sequence in sequences or ():
            sequence.reserve(idx.size(1))
        for i, block in enumerate(self.h):
            x = block(x, i, sequences)
        for sequence in sequences or ():
            sequence.length += idx.size(1)
        return self.lm_head(self.ln_f(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    d, h = model.wte.weight.shape[1], model.h[0].h
    pool = PagePool(len(model.h), h, d // h, model.wte.weight)
    sequences = [Sequence(pool) for _ in range(chunks[0].size(0))]
    outputs = []
    for step, chunk in enumerate(chunks):
        if step == 1 and reorder is not None:
            sequences = [sequences[int(b)].fork() for b in reorder]
        outputs.append(model(chunk, sequences))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="paged beams",
    build=lambda c: GPT2(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.max_len),
    forward=lambda m, tokens: m(tokens),
    cache=cached,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "tied": False,
    },
)

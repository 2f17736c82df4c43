# A decoder served from pages: sequences own tables of page numbers, beams fork tables and share full pages.
from collections import Counter

import torch
from torch import nn

from veriformer.properties import Subject

PAGE = 4


class PagedCache:
    """Keys and values of all layers in pages [layer, 2, page, slot, width]."""

    def __init__(self, batch, layers, width, like):
        self.pages = like.new_zeros(layers, 2, 0, PAGE, width)
        self.tables = [[] for _ in range(batch)]
        self.length = 0

    def new_page(self):
        blank = self.pages.new_zeros(*self.pages.shape[:2], 1, *self.pages.shape[3:])
        self.pages = torch.cat((self.pages, blank), dim=2)
        return self.pages.shape[2] - 1

    def reserve(self, count):
        for table in self.tables:
            while len(table) * PAGE < self.length + count:
                table.append(self.new_page())

    def write(self, layer, k, v):
        for b, table in enumerate(self.tables):
            for t in range(k.shape[1]):
                page, slot = table[(self.length + t) // PAGE], (self.length + t) % PAGE
                self.pages[layer, 0, page, slot] = k[b, t]
                self.pages[layer, 1, page, slot] = v[b, t]

    def read(self, layer, count):
        rows = torch.tensor(self.tables, device=self.pages.device)
        both = self.pages[layer][:, rows].flatten(2, 3)  # [2, B, S, width]
        return both[:, :, :count]

    def fork(self, order):
        self.tables = [list(self.tables[source]) for source in order]
        if self.length % PAGE == 0:
            return  # only full pages are shared, and those are never written again
        uses = Counter(table[-1] for table in self.tables)
        for table in self.tables:  # copy on write: the open page is everybody's own
            if uses[table[-1]] > 1:
                uses[table[-1]] -= 1
                copy = self.new_page()
                self.pages[:, :, copy] = self.pages[:, :, table[-1]]
                table[-1] = copy


class Layer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln_a, self.ln_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ff = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, x, cache=None, number=0):
        q, k, v = self.qkv(self.ln_a(x)).chunk(3, dim=-1)
        if cache is not None:
            cache.write(number, k, v)
            k, v = cache.read(number, cache.length + x.shape[1])
        T, S = q.shape[1], k.shape[1]
        q, k, v = (z.unflatten(-1, (self.heads, -1)).transpose(1, 2) for z in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))
        return x + self.ff(self.ln_f(x))


class PagedDecoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(max_len, width)
        self.layers = nn.ModuleList(Layer(width, heads, hidden) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocab)

    def forward(self, tokens, cache=None):
        start = 0 if cache is None else cache.length
        x = self.tok(tokens) + self.pos.weight[start : start + tokens.shape[1]]
        if cache is not None:
            cache.reserve(tokens.shape[1])
        for number, layer in enumerate(self.layers):
            x = layer(x, cache, number)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.head(self.ln(x))


@torch.no_grad()
def serve(model, chunks, reorder=None):
    cache = PagedCache(len(chunks[0]), len(model.layers), model.tok.embedding_dim, model.tok.weight)
    outs = []
    for n, chunk in enumerate(chunks):
        outs.append(model(chunk, cache))
        if n == 0 and reorder is not None:
            cache.fork([int(r) for r in reorder])
    return torch.cat(outs, dim=1)


subject = Subject(
    kind="decoder",
    name="paged decoder",
    build=lambda c: PagedDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens: model(tokens),
    cache=serve,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
    },
)

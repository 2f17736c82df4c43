WHAT = 'when a beam is forked, the block table is copied but the partly filled last page is shared (no copy on write): two beams from one parent write their next keys into the same slots (missing before line 39).'
"""A decoder with a paged key-value cache: pages of four tokens, a block table per sequence."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from veriformer.properties import Subject

PAGE = 4


class PagedCache:
    def __init__(self, layers):
        self.pages = [[] for _ in range(layers)]  # of each layer: tensors [2, PAGE, H, K]
        self.tables = None                        # of each sequence: numbers of pages
        self.length = 0

    def reserve(self, batch, count, like):
        """Room for `count` more tokens of each sequence."""
        if self.tables is None:
            self.tables = [[] for _ in range(batch)]
        for table in self.tables:
            while len(table) * PAGE < self.length + count:
                table.append(len(self.pages[0]))
                for pool in self.pages:
                    pool.append(like.new_zeros(2, PAGE, *like.shape[-2:]))

    def write(self, layer, k, v):
        for b, table in enumerate(self.tables):
            for t in range(k.shape[1]):
                page, slot = divmod(self.length + t, PAGE)
                self.pages[layer][table[page]][:, slot] = torch.stack([k[b, t], v[b, t]])

    def read(self, layer, total):
        rows = [torch.cat([self.pages[layer][p] for p in table], 1)[:, :total] for table in self.tables]
        return torch.stack(rows, 1)  # [2, B, total, H, K]

    def fork(self, order):
        self.tables = [list(self.tables[int(i)]) for i in order]


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.norm_a, self.norm_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(d, d) for _ in range(4))
        self.w1, self.w2 = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, mask, cache, index):
        y = self.norm_a(x)
        q, k, v = (w(y).unflatten(-1, (self.h, -1)) for w in (self.wq, self.wk, self.wv))
        if cache is not None:
            if index == 0:
                cache.reserve(x.shape[0], x.shape[1], k)
            cache.write(index, k, v)
            k, v = cache.read(index, cache.length + x.shape[1])
        s = torch.einsum("bthk,bshk->bhts", q, k) * q.shape[-1] ** -0.5
        w = s.masked_fill(~mask, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        x = x + self.wo(torch.einsum("bhts,bshk->bthk", w, v).flatten(2))
        return x + self.w2(F.gelu(self.w1(self.norm_f(x)), approximate="tanh"))


class PagedLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, cache=None):
        T = tokens.shape[1]
        done = 0 if cache is None else cache.length
        mask = torch.ones(T, done + T, dtype=torch.bool, device=tokens.device).tril(done)[None, None]
        if attention_mask is not None:
            mask = mask & attention_mask[:, None, None, :]
        x = self.tok(tokens) + self.pos.weight[done:done + T]
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, cache, i)
        if cache is not None:
            cache.length += T
        return self.head(self.norm(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    cache, out = PagedCache(len(model.layers)), []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            cache.fork(reorder)
        out.append(model(chunk, cache=cache))
    return torch.cat(out, 1)


subject = Subject(
    kind="decoder",
    build=PagedLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cached,
    mask_forms=("padding",),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
              "residual": True, "activation": "gelu_tanh", "bias": True, "output_bias": False, "tied": False,
              "padding_side": "right"},
)

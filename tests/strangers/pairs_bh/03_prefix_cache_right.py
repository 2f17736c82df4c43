"""A decoder with a paged key-value pool: rows of a batch that begin alike share the pages of their common prefix."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class PagePool:
    """Pages of one token, found again by what they hold."""

    def __init__(self):
        self.index, self.k, self.v = {}, [], []

    def put(self, key, k, v):
        page = self.index.get(key)
        if page is None:
            page = self.index[key] = len(self.k)
            self.k.append(k)
            self.v.append(v)
        return page

    def gather(self, tables):
        k = torch.stack([torch.stack([self.k[p] for p in table], dim=1) for table in tables])
        v = torch.stack([torch.stack([self.v[p] for p in table], dim=1) for table in tables])
        return k, v


class PagedState:
    def __init__(self, batch, num_layers):
        self.history = [[] for _ in range(batch)]
        self.pools = [PagePool() for _ in range(num_layers)]
        self.tables = [[[] for _ in range(batch)] for _ in range(num_layers)]

    @property
    def seen(self):
        return len(self.tables[-1][0])

    def write(self, layer, k, v):
        """k, v [B, H, t, K]: of the last t tokens of the history."""
        pool, tables = self.pools[layer], self.tables[layer]
        for b, history in enumerate(self.history):
            first = len(history) - k.size(2)
            for j in range(k.size(2)):
                at = first + j
                key = tuple(history[: at + 1])
                tables[b].append(pool.put(key, k[b, :, j], v[b, :, j]))
        return pool.gather(tables)


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, i=0, state=None):
        h = self.attn_norm(x)
        q, k, v = self.split(self.wq(h)), self.split(self.wk(h)), self.split(self.wv(h))
        if state is not None:
            k, v = state.write(i, k, v)
        t, s = q.size(2), k.size(2)
        allowed = torch.ones(t, s, dtype=torch.bool, device=x.device).tril(s - t)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.w2(F.gelu(self.w1(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.blocks = nn.ModuleList([Block(dim, heads, hidden) for _ in range(layers)])
        self.norm, self.out = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, state=None):
        start = 0
        if state is not None:
            start = state.seen
            for history, row in zip(state.history, tokens.tolist()):
                history.extend(row)
        x = self.tok(tokens) + self.pos(torch.arange(start, start + tokens.size(1), device=tokens.device))
        for i, block in enumerate(self.blocks):
            x = block(x, i, state)
        return self.out(self.norm(x))


def cached(model, chunks):
    state = PagedState(chunks[0].size(0), len(model.blocks))
    return torch.cat([model(chunk, state) for chunk in chunks], dim=1)


subject = Subject(
    kind="decoder",
    name="paged decoder",
    build=lambda c: Decoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    declares={
        "causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": True,
        "activation": "gelu",
    },
)

WHAT = "PagedKV.fork copies the block tables of reordered beams but not the last, partly filled block, so two beams forked from one parent write their next keys and values into the same physical slot (the copy-on-write in fork is missing)"
import math
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject

BLOCK = 4


class PagedKV:
    """Keys and values of all sequences in one pool of blocks, found through block tables."""

    def __init__(self, layers, batch, total, heads, width, like):
        per_sequence = (total + BLOCK - 1) // BLOCK
        blocks = 2 * batch * (per_sequence + 1)
        self.pool = like.new_zeros(layers, 2, blocks, BLOCK, heads, width)
        self.free = list(range(blocks))[::-1]
        self.tables = [[] for _ in range(batch)]
        self.length = 0

    def reserve(self, count):
        need = (self.length + count + BLOCK - 1) // BLOCK
        for table in self.tables:
            while len(table) < need:
                table.append(self.free.pop())

    def write(self, layer, k, v):
        for b, table in enumerate(self.tables):
            for t in range(k.shape[1]):
                block, slot = divmod(self.length + t, BLOCK)
                self.pool[layer, 0, table[block], slot] = k[b, t]
                self.pool[layer, 1, table[block], slot] = v[b, t]

    def read(self, layer, length):
        tables = torch.tensor(self.tables, device=self.pool.device)
        kv = self.pool[layer][:, tables].flatten(2, 3)[:, :, :length]
        return kv[0], kv[1]

    def fork(self, order):
        self.tables = [list(self.tables[i]) for i in order]


class Layer(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.proj = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, index, paged=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(B, T, 3, self.heads, -1).unbind(2)
        past = 0
        if paged is not None:
            past = paged.length
            paged.write(index, k, v)
            k, v = paged.read(index, past + T)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        visible = torch.ones(T, past + T, dtype=torch.bool, device=x.device).tril(past)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        x = x + self.proj(torch.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.width = c.num_heads, c.d_model // c.num_heads
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, paged=None):
        past = 0 if paged is None else paged.length
        T = tokens.shape[1]
        if paged is not None:
            paged.reserve(T)
        x = self.tok(tokens) + self.pos(torch.arange(past, past + T, device=tokens.device))
        for i, layer in enumerate(self.layers):
            x = layer(x, i, paged)
        if paged is not None:
            paged.length += T
        return self.head(self.ln_f(x))


@torch.no_grad()
def cached(model, chunks, reorder=None):
    total = sum(c.shape[1] for c in chunks)
    paged = PagedKV(len(model.layers), chunks[0].shape[0], total, model.heads, model.width, model.tok.weight)
    outputs = []
    for i, chunk in enumerate(chunks):
        if i == 1 and reorder is not None:
            paged.fork([int(r) for r in reorder])
        outputs.append(model(chunk, paged))
    return torch.cat(outputs, 1)


subject = Subject(kind="decoder", build=LM, forward=lambda m, tokens: m(tokens), cache=cached,
                  declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "activation": "gelu"})

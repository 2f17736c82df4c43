"""A GPT that decodes from a paged key-value cache: beams share pages, and a shared page is copied before it is written."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

PAGE = 4


class Pool:
    """Pages [layers, 2, PAGE, heads, width], a table of them for each sample, and how many tables name each page."""

    def __init__(self, samples, layers, heads, width, like):
        self.shape, self.like = (layers, 2, PAGE, heads, width), like
        self.pages, self.refs = [], []
        self.tables = [[] for _ in range(samples)]
        self.length = 0

    def new(self, page):
        self.pages.append(page)
        self.refs.append(1)
        return len(self.pages) - 1

    def make_room(self):
        """Every sample gets a slot of its own for the next token."""
        for table in self.tables:
            if self.length % PAGE == 0:
                table.append(self.new(self.like.new_zeros(self.shape)))
            elif self.refs[table[-1]] > 1:  # copy on write
                self.refs[table[-1]] -= 1
                table[-1] = self.new(self.pages[table[-1]].clone())

    def write(self, layer, k, v):
        for table, key, value in zip(self.tables, k, v):
            page = self.pages[table[-1]]
            page[layer, 0, self.length % PAGE] = key
            page[layer, 1, self.length % PAGE] = value

    def read(self, layer):
        rows = [torch.cat([self.pages[page][layer] for page in table], dim=1) for table in self.tables]
        return torch.stack(rows, dim=1)[:, :, : self.length + 1]  # [2, B, S, H, K]

    def reorder(self, order):
        old = self.tables
        for parent in order:
            for page in old[parent]:
                self.refs[page] += 1
        self.tables = [list(old[parent]) for parent in order]
        for table in old:
            for page in table:
                self.refs[page] -= 1


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, pool=None, layer=None):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(B, T, 3, self.heads, D // self.heads).unbind(2)
        if pool is not None:
            pool.write(layer, k[:, 0], v[:, 0])
            k, v = pool.read(layer)
        score = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
        if pool is None:
            score = score.masked_fill(torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1), -math.inf)
        mixed = torch.einsum("bhts,bshd->bthd", score.softmax(-1), v)
        x = x + self.proj(mixed.reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class PagedGPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.ln_f, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))

    @torch.no_grad()
    def step(self, token, pool):
        pool.make_room()
        x = self.wte(token) + self.wpe.weight[pool.length]
        for i, block in enumerate(self.blocks):
            x = block(x, pool, i)
        pool.length += 1
        return self.head(self.ln_f(x))


def cached(model, chunks, reorder=None):
    heads, width = model.blocks[0].heads, model.wte.embedding_dim
    pool = Pool(chunks[0].shape[0], len(model.blocks), heads, width // heads, model.head.weight)
    outputs = []
    for i, chunk in enumerate(chunks):
        outputs.append(torch.cat([model.step(token, pool) for token in chunk.split(1, dim=1)], dim=1))
        if i == 0 and reorder is not None:
            pool.reorder([int(parent) for parent in reorder])
    return outputs


subject = Subject(
    kind="decoder",
    name="paged GPT",
    build=PagedGPT,
    forward=lambda model, tokens: model(tokens),
    cache=cached,
    declares={"positions": "learned", "norm_placement": "pre", "norm": "layer", "activation": "gelu"},
)

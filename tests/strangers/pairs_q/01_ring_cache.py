"""A small decoder with sliding windows whose cache is a ring of as many slots as the window is wide."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The cached path writes a chunk's keys into the ring before the chunk's own queries have read it."
CAUSE = (
    "A chunk of several tokens behind a past overwrites the oldest slots of the ring buffer, which the first queries of "
    "that chunk still have in their window: they lose keys. Prompts and single-token steps are right, chunked decoding is not."
)
WINDOW = 4


class Ring:
    """Keys, values and the positions that they stand for."""

    def __init__(self, like):
        B, H, _, d = like.shape
        self.k, self.v = like.new_zeros(B, H, WINDOW, d), like.new_zeros(B, H, WINDOW, d)
        self.pos = torch.full((WINDOW,), -1, device=like.device)

    def write(self, k, v, pos):
        k, v, pos = k[:, :, -WINDOW:], v[:, :, -WINDOW:], pos[-WINDOW:]
        slot = pos % WINDOW
        self.k, self.v = self.k.index_copy(2, slot, k), self.v.index_copy(2, slot, v)
        self.pos = self.pos.index_copy(0, slot, pos)


class Attention(nn.Module):
    def __init__(self, dim, heads, read_first):
        super().__init__()
        self.heads, self.read_first = heads, read_first
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, pos, rings=None, i=None):
        B, T, C = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        keys, values, at = k, v, pos
        if rings is not None:
            ring = rings.setdefault(i, Ring(k))
            if self.read_first:
                keys, values = torch.cat([ring.k, k], 2), torch.cat([ring.v, v], 2)
                at = torch.cat([ring.pos, pos])
                ring.write(k, v, pos)
            else:
                ring.write(k, v, pos)
                if pos[0] > 0:
                    keys, values, at = ring.k, ring.v, ring.pos
        far = pos[:, None] - at[None, :]
        seen = (far >= 0) & (far < WINDOW) & (at >= 0)
        scores = (q @ keys.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ values
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class Decoder(nn.Module):
    def __init__(self, c, read_first):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.attn = nn.ModuleList(Attention(c.d_model, c.num_heads, read_first) for _ in range(c.num_layers))
        self.ff = nn.ModuleList(
            nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
            for _ in range(c.num_layers)
        )
        self.n1 = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.n2 = nn.ModuleList(nn.LayerNorm(c.d_model) for _ in range(c.num_layers))
        self.last, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, rings=None):
        pos = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok(tokens) + self.pos(pos)
        for i, (attn, ff, n1, n2) in enumerate(zip(self.attn, self.ff, self.n1, self.n2)):
            x = x + attn(n1(x), pos, rings, i)
            x = x + ff(n2(x))
        return F.linear(self.last(x), self.head.weight)


def cached(model, chunks):
    rings, start, out = {}, 0, []
    for chunk in chunks:
        out.append(model(chunk, start, rings))
        start += chunk.shape[1]
    return torch.cat(out, 1)


def subject(read_first):
    return Subject(
        kind="decoder", name="windowed decoder", build=lambda c: Decoder(c, read_first),
        forward=lambda m, tokens: m(tokens), cache=cached,
        declares={"window": WINDOW, "positions": "learned", "norm_placement": "pre", "norm": "layer"},
    )  # fmt: skip


right, wrong = subject(True), subject(False)

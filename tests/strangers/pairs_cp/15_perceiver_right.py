"""Perceiver classifier: a few latents read the sequence, think, and are averaged. Heads are folded into the batch (bmm)."""

import torch
from torch import nn

from veriformer.properties import Subject


class FoldedAttention(nn.Module):
    def __init__(self, dim, heads, reads=False):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_context = nn.LayerNorm(dim), nn.LayerNorm(dim) if reads else None
        self.to_q, self.to_kv, self.to_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def fold(self, x):
        b, n, d = x.shape
        return x.view(b, n, self.heads, d // self.heads).transpose(1, 2).reshape(b * self.heads, n, d // self.heads)

    def forward(self, x, context=None, mask=None):
        b, n, d = x.shape
        y = self.norm(x)
        context = y if context is None else self.norm_context(context)
        q, (k, v) = self.fold(self.to_q(y)), map(self.fold, self.to_kv(context).chunk(2, -1))
        sim = torch.bmm(q, k.transpose(1, 2)) * (d // self.heads) ** -0.5
        if mask is not None:
            hidden = ~mask.repeat_interleave(self.heads, dim=0)[:, None, :]
            sim = sim.masked_fill(hidden, -torch.finfo(sim.dtype).max)
        out = torch.bmm(sim.softmax(-1), v)
        out = out.view(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, d)
        return x + self.to_out(out)


class Think(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        return x + self.net(x)


class Perceiver(nn.Module):
    def __init__(self, c, latents=4):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, c.d_model))
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.read = nn.ModuleList(FoldedAttention(c.d_model, c.num_heads, True) for _ in range(c.num_layers))
        self.mull = nn.ModuleList(FoldedAttention(c.d_model, c.num_heads) for _ in range(c.num_layers))
        self.think = nn.ModuleList(Think(c.d_model, c.d_ff) for _ in range(c.num_layers))
        self.to_classes = nn.Sequential(nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.num_classes))

    def forward(self, ids, mask=None):
        data = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        x = self.latents.expand(len(ids), -1, -1)
        for read, mull, think in zip(self.read, self.mull, self.think):
            x = think(mull(read(x, data, mask)))
        return self.to_classes(x.mean(1))


subject = Subject(
    kind="classifier",
    build=Perceiver,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "padding_side": "right", "pooling": "other"},
)

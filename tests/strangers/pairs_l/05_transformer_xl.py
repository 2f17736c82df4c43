"""Transformer-XL: relative attention with u, v and the shift, memory from the segments before."""

import torch
from torch import nn

from veriformer.properties import Subject


def rel_shift(x):
    b, h, q, k = x.shape
    x = torch.cat([x.new_zeros(b, h, q, 1), x], dim=-1)
    return x.view(b, h, k + 1, q)[:, :, 1:].reshape(b, h, q, k)


def sinusoid(pos, d):
    inv = 1.0 / 10000 ** (torch.arange(0.0, d, 2.0, dtype=torch.float64, device=pos.device) / d)
    ang = pos.to(torch.float64)[:, None] * inv
    return torch.cat([ang.sin(), ang.cos()], -1)


def transformer_xl(order):
    class RelAttn(nn.Module):
        def __init__(self, d, h):
            super().__init__()
            self.h, self.dh = h, d // h
            self.q_net, self.kv_net = nn.Linear(d, d, bias=False), nn.Linear(d, 2 * d, bias=False)
            self.r_net, self.o_net = nn.Linear(d, d, bias=False), nn.Linear(d, d, bias=False)
            self.u = nn.Parameter(torch.randn(h, 1, self.dh) * 0.1)
            self.v = nn.Parameter(torch.randn(h, 1, self.dh) * 0.1)
            self.norm = nn.LayerNorm(d)

        def forward(self, w, r, mem):
            b, n, d = w.shape
            cat = w if mem is None else torch.cat([mem, w], 1)
            k_len = cat.shape[1]
            cut = lambda t, m: t.view(t.shape[0], m, self.h, self.dh).transpose(1, 2)
            q = cut(self.q_net(w), n)
            k, val = (cut(t, k_len) for t in self.kv_net(cat).chunk(2, -1))
            rk = self.r_net(r).view(k_len, self.h, self.dh).transpose(0, 1)
            ac = (q + self.u) @ k.transpose(-1, -2)
            bd = rel_shift((q + self.v) @ rk.transpose(-1, -2))
            hidden = torch.ones(n, k_len, dtype=torch.bool, device=w.device).triu(1 + k_len - n)
            p = ((ac + bd) * self.dh**-0.5).masked_fill(hidden, float("-inf")).softmax(-1)
            return self.norm(w + self.o_net((p @ val).transpose(1, 2).reshape(b, n, d)))

    class Layer(nn.Module):
        def __init__(self, d, h, ff):
            super().__init__()
            self.attn = RelAttn(d, h)
            self.ff = nn.Sequential(nn.Linear(d, ff), nn.ReLU(), nn.Linear(ff, d))
            self.norm = nn.LayerNorm(d)

        def forward(self, w, r, mem):
            w = self.attn(w, r, mem)
            return self.norm(w + self.ff(w))

    class TransformerXL(nn.Module):
        def __init__(self, vocab, d, h, n, ff):
            super().__init__()
            self.d = d
            self.emb = nn.Embedding(vocab, d)
            self.layers = nn.ModuleList(Layer(d, h, ff) for _ in range(n))
            self.out = nn.Linear(d, vocab)

        def forward(self, ids, mems=None):
            x = self.emb(ids)
            k_len = ids.shape[1] + (0 if mems is None else mems[0].shape[1])
            r = sinusoid(order(k_len, ids.device), self.d).to(x.dtype)
            kept = []
            for i, layer in enumerate(self.layers):
                mem = None if mems is None else mems[i]
                kept.append(x if mem is None else torch.cat([mem, x], 1))
                x = layer(x, r, mem)
            return self.out(x), kept

    return TransformerXL


def falling(k_len, device):
    return torch.arange(k_len - 1, -1, -1, device=device)


def rising(k_len, device):
    return torch.arange(k_len, device=device)


def segments(model, chunks):
    mems, out = None, []
    for chunk in chunks:
        y, mems = model(chunk, mems)
        out.append(y)
    return torch.cat(out, 1)


def subject(cls):
    return Subject(
        kind="decoder",
        name="transformer-xl",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, tokens: m(tokens)[0],
        cache=segments,
        domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
        declares={"causal": True},
    )


right = subject(transformer_xl(falling))
wrong = subject(transformer_xl(rising))
WHAT = "R is made for distances 0..k-1 instead of k-1..0 before the relative shift: distance d is encoded as k-1-d"
CAUSE = (
    "The relative positions are in rising instead of falling order, so after the shift a distance d has the encoding of "
    "(length - 1 - d): outputs of a prefix change with the length of the sequence, though no future token reaches them."
)

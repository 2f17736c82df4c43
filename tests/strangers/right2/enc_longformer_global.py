"""Longformer style: each token sees its neighbours at distance 1 and token 0, token 0 sees all through projections of its
own. Unusual: not all that could be seen is seen, and one position is treated differently; right, that is the pattern."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.loc, s.glob, s.o = c.num_heads, nn.Linear(D, 3 * D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        s.n1, s.n2, s.up, s.down = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, c.d_ff), nn.Linear(c.d_ff, D)

    def attend(s, q, k, v, keep):
        w = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~keep, torch.finfo(q.dtype).min).softmax(-1)
        return (w @ v).transpose(1, 2).flatten(2)

    def heads(s, y):
        return (t.unflatten(-1, (s.h, -1)).transpose(1, 2) for t in y.chunk(3, -1))

    def forward(s, x, mask):
        T, y = x.shape[1], s.n1(x)
        i = torch.arange(T, device=x.device)
        near = ((i[:, None] - i[None]).abs() <= 1) | (i[None] == 0)
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        real = real[:, None, None, :]
        local = s.attend(*s.heads(s.loc(y)), near & real)
        q, k, v = s.heads(s.glob(y))
        first = s.attend(q[:, :, :1], k, v, real)
        x = x + s.o(torch.cat((first, local[:, 1:]), 1))
        return x + s.down(F.gelu(s.up(s.n2(x))))


class Long(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.emb, s.layers, s.norm = nn.Embedding(c.vocab_size, D), nn.ModuleList(Layer(c) for _ in range(c.num_layers)), nn.LayerNorm(D)
        s.register_buffer("freq", 10000.0 ** (-torch.arange(0, D, 2) / D), persistent=False)

    def forward(s, tokens, mask=None):
        x = s.emb(tokens)
        a = torch.arange(x.shape[1], device=x.device)[:, None] * s.freq
        x = x + torch.cat((a.sin(), a.cos()), -1).to(x.dtype)
        for layer in s.layers:
            x = layer(x, mask)
        return s.norm(x)


args = dict(kind="encoder", build=Long, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "sparse": True, "positions": "sinusoidal", "layout": "halves", "norm": "layer",
                                     "norm_placement": "pre", "final_norm": True, "activation": "gelu", "padding_side": "right",
                                     "structure": "other"})

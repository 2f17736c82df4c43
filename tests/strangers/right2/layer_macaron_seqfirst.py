"""Macaron layer (half a feed-forward, attention, half a feed-forward), sequence-first inside. Unusual: time is the first
axis and samples the second; right, the outer transposes undo it and heads are folded into the batch axis as in fairseq."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class Macaron(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.h, s.in_proj, s.out_proj = c.num_heads, nn.Linear(D, 3 * D), nn.Linear(D, D)
        ff = lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, c.d_ff), nn.ReLU(), nn.Dropout(c.dropout), nn.Linear(c.d_ff, D))
        s.f1, s.f2, s.norm = ff(), ff(), nn.LayerNorm(D)

    def attend(s, x, mask):  # T B D
        T, B, D = x.shape
        q, k, v = (t.reshape(T, B * s.h, D // s.h).transpose(0, 1) for t in s.in_proj(x).chunk(3, -1))
        w = torch.bmm(q * (D // s.h) ** -0.5, k.transpose(1, 2))
        if mask is not None:
            hide = ~mask[:, None, None].expand(B, s.h, 1, T).reshape(B * s.h, 1, T)
            w = w.masked_fill(hide, torch.finfo(w.dtype).min)
        y = torch.bmm(F.softmax(w, -1), v).transpose(0, 1).reshape(T, B, D)
        return s.out_proj(y)

    def forward(s, x, mask=None):
        x = x.transpose(0, 1)
        x = x + 0.5 * s.f1(x)
        x = x + s.attend(s.norm(x), mask)
        return (x + 0.5 * s.f2(x)).transpose(0, 1)


args = dict(kind="layer", build=Macaron, forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "pre", "activation": "relu",
                                     "cross_attention": False, "structure": "other"})

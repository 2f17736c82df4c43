"""Conformer: half-step feed-forwards around attention and a depthwise convolution, LayerNorm for BatchNorm. Unusual: no
positions but what the convolution's width of 3 gives; right with padding, as padded frames are set to zero before the
convolution, which pads with zeros itself. NoPE attention by nn.MultiheadAttention."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class FF(nn.Sequential):
    def __init__(s, D, F_):
        super().__init__(nn.LayerNorm(D), nn.Linear(D, F_), nn.SiLU(), nn.Linear(F_, D))


class Conv(nn.Module):
    def __init__(s, D):
        super().__init__()
        s.ln, s.p1, s.p2 = nn.LayerNorm(D), nn.Conv1d(D, 2 * D, 1), nn.Conv1d(D, D, 1)
        s.dw, s.mid = nn.Conv1d(D, D, 3, padding=1, groups=D), nn.LayerNorm(D)

    def forward(s, x, mask):
        y = F.glu(s.p1(s.ln(x).mT), 1)
        if mask is not None:
            y = y.masked_fill(~mask[:, None], 0.0)
        return s.p2(F.silu(s.mid(s.dw(y).mT)).mT).mT


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        D = c.d_model
        s.f1, s.f2, s.conv = FF(D, c.d_ff), FF(D, c.d_ff), Conv(D)
        s.ln, s.mha, s.out = nn.LayerNorm(D), nn.MultiheadAttention(D, c.num_heads, batch_first=True), nn.LayerNorm(D)

    def forward(s, x, mask):
        x = x + 0.5 * s.f1(x)
        y, hide = s.ln(x), None
        if mask is not None:  # a sample without any real token sees itself rather than nothing
            hide = ~mask & mask.any(1, keepdim=True)
        x = x + s.mha(y, y, y, key_padding_mask=hide, need_weights=False)[0]
        x = x + s.conv(x, mask)
        return s.out(x + 0.5 * s.f2(x))


class Conformer(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.blocks = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Block(c) for _ in range(c.num_layers))

    def forward(s, tokens, mask=None):
        x = s.emb(tokens)
        for b in s.blocks:
            x = b(x, mask)
        return x


args = dict(kind="encoder", build=Conformer, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "other", "norm": "layer", "norm_placement": "other", "activation": "other",
                                     "padding_side": "both", "structure": "other"})

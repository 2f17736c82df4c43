"""Encoder with symmetric ALiBi and one module per head ("Head" classes of the tutorials), LayerScale, RMS-free pre-LN.
Unusual: |i - j| rather than i - j, since an encoder looks both ways."""
import torch
from torch import nn
from veriformer.properties import Subject


class Head(nn.Module):
    def __init__(s, D, K, slope):
        super().__init__()
        s.key, s.query, s.value, s.slope = nn.Linear(D, K, bias=False), nn.Linear(D, K, bias=False), nn.Linear(D, K, bias=False), slope

    def forward(s, x, mask):
        k, q, v = s.key(x), s.query(x), s.value(x)
        i = torch.arange(x.shape[1], device=x.device)
        w = q @ k.transpose(1, 2) * k.shape[-1] ** -0.5 - s.slope * (i[:, None] - i[None]).abs().to(x.dtype)
        if mask is not None:
            w = w.masked_fill(mask[:, None] == 0, -1e9)
        return w.softmax(-1) @ v


class Block(nn.Module):
    def __init__(s, c):
        super().__init__()
        D, H = c.d_model, c.num_heads
        s.heads = nn.ModuleList(Head(D, D // H, 2.0 ** (-8 * (i + 1) / H)) for i in range(H))
        s.proj, s.ln1, s.ln2 = nn.Linear(D, D), nn.LayerNorm(D), nn.LayerNorm(D)
        s.ffwd = nn.Sequential(nn.Linear(D, c.d_ff), nn.ReLU(), nn.Linear(c.d_ff, D))
        s.g1, s.g2 = nn.Parameter(0.1 * torch.ones(D)), nn.Parameter(0.1 * torch.ones(D))

    def forward(s, x, mask):
        y = s.ln1(x)
        x = x + s.g1 * s.proj(torch.cat([h(y, mask) for h in s.heads], -1))
        return x + s.g2 * s.ffwd(s.ln2(x))


class Enc(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.emb, s.blocks = nn.Embedding(c.vocab_size, c.d_model), nn.ModuleList(Block(c) for _ in range(c.num_layers))
        s.ln = nn.LayerNorm(c.d_model)

    def forward(s, t, mask=None):
        x = s.emb(t)
        for b in s.blocks:
            x = b(x, mask)
        return s.ln(x)


args = dict(kind="encoder", build=Enc, forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))
undeclared = Subject(**args)
declared = Subject(**args, declares={"causal": False, "positions": "alibi", "bidirectional": False, "norm": "layer", "norm_placement": "pre",
                                     "final_norm": True, "activation": "relu", "padding_side": "both", "structure": "other"})

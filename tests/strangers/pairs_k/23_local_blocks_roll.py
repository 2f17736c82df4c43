"""Causal sliding-window self-attention in blocks: each block of queries looks at its own and the previous block of keys."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "The previous block comes from torch.roll, so that of the first block is the last block: the end of the sequence leaks in."
CAUSE = (
    "The first block of queries sees the last block of keys (the blocks are rolled around, and wrapped ones are not "
    "masked), so early outputs depend on the end of the sequence."
)
WINDOW = 4


def by_padding(blocks):
    return F.pad(blocks, (0, 0, 0, 0, 1, 0))[:, :, :-1]


def by_roll(blocks):
    return blocks.roll(1, dims=2)


def make(previous, first_has_none):
    class LocalAttention(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

        def forward(self, x):
            B, T, D = x.shape
            w = WINDOW
            extra = -T % w
            q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            q, k, v = (F.pad(t, (0, 0, 0, extra)).unflatten(2, (-1, w)) for t in (q, k, v))  # [B, H, N, w, K]
            k, v = (torch.cat((previous(t), t), dim=3) for t in (k, v))  # [B, H, N, 2w, K]
            row, column = torch.arange(w, device=x.device)[:, None], torch.arange(-w, w, device=x.device)
            band = (column <= row) & (column > row - w)
            band = band.expand(q.shape[2], w, 2 * w)
            if first_has_none:
                block = torch.arange(q.shape[2], device=x.device)[:, None, None]
                band = band & ((block > 0) | (column >= 0))
            scores = torch.einsum("bhnqd,bhnkd->bhnqk", q, k) * q.shape[-1] ** -0.5
            scores = scores.masked_fill(~band, torch.finfo(scores.dtype).min)
            y = torch.einsum("bhnqk,bhnkd->bhnqd", scores.softmax(-1), v).flatten(2, 3)[:, :, :T]
            return self.out(y.transpose(1, 2).reshape(B, T, D))

    return LocalAttention


def subject(previous, first_has_none):
    local = make(previous, first_has_none)
    return Subject(
        kind="self_attention",
        name="local attention",
        build=lambda c: local(c.d_model, c.num_heads),
        forward=lambda m, x: m(x),
        declares={"causal": True, "window": WINDOW, "positions": "none"},
    )


right = subject(by_padding, True)
wrong = subject(by_roll, False)

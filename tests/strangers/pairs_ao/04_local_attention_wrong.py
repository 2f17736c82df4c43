WHAT = "the padding mask is lost for the keys of the previous block (all of an existing block count as real): with left padding or holes real queries attend to padding (line 36)."
"""Causal sliding-window attention at linear cost: every block of queries meets its own block and the one before."""

import torch
from torch import nn

from veriformer.properties import Subject

WINDOW = 4


def previous(blocks):
    """Block n - 1 at place n; zeros (False) before the first."""
    return torch.cat([torch.zeros_like(blocks[:, :1]), blocks[:, :-1]], dim=1)


class LocalSelfAttention(nn.Module):
    def __init__(self, d_model, num_heads, window=WINDOW):
        super().__init__()
        self.heads, self.window = num_heads, window
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x, attention_mask=None):
        (B, T, D), W = x.shape, self.window
        keep = torch.ones(B, T, dtype=torch.bool, device=x.device) if attention_mask is None else attention_mask.bool()
        tail = -T % W
        if tail:
            x = torch.cat([x, x.new_zeros(B, tail, D)], dim=1)
            keep = torch.cat([keep, keep.new_zeros(B, tail)], dim=1)
        q, k, v = self.qkv(x).view(B, -1, W, 3, self.heads, D // self.heads).unbind(3)
        keep = keep.view(B, -1, W)

        k = torch.cat([previous(k), k], dim=2)
        v = torch.cat([previous(v), v], dim=2)
        keep = torch.cat([previous(torch.ones_like(keep)), keep], dim=2)

        i = torch.arange(W, device=x.device)[:, None] + W
        j = torch.arange(2 * W, device=x.device)[None, :]
        band = (j <= i) & (i - j < W)
        allowed = (band & keep[:, :, None, :])[:, :, None]

        scores = torch.einsum("bnihk,bnjhk->bnhij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~allowed, 0.0)
        y = torch.einsum("bnhij,bnjhk->bnihk", weights, v)
        return self.out(y.reshape(B, -1, D)[:, :T])


subject = Subject(
    kind="self_attention",
    name="local attention",
    build=lambda c: LocalSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False, "empty_row": "zeros"},
)

"""Causal sliding-window self-attention in blocks: every block of W queries sees its own block and the one before it."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WINDOW = 4


class LocalSelfAttention(nn.Module):
    def __init__(self, dim, heads, window=WINDOW):
        super().__init__()
        self.heads, self.window = heads, window
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def _with_previous(self, t):
        """[..., N, W, *] of blocks of what was padded by one block in front -> [..., N, 2W, *]."""
        return torch.cat((t[:, :-1], t[:, 1:]), dim=2)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        H, W = self.heads, self.window
        tail = -T % W
        blocks = (T + tail) // W
        valid = x.new_ones(B, T, dtype=torch.bool) if attention_mask is None else attention_mask

        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q = F.pad(q, (0, 0, 0, tail)).view(B, blocks, W, H, D // H)
        k, v = (F.pad(t, (0, 0, W, tail)).view(B, blocks + 1, W, H, D // H) for t in (k, v))
        valid = F.pad(F.pad(valid, (0, tail), value=False), (W, 0), value=False).view(B, blocks + 1, W)
        k, v, valid = self._with_previous(k), self._with_previous(v), self._with_previous(valid)

        i = torch.arange(W, device=x.device)[:, None] + W
        j = torch.arange(2 * W, device=x.device)[None, :]
        band = (i - j >= 0) & (i - j < W)
        keep = (band & valid[:, :, None, :])[:, :, None]  # B N 1 W 2W

        scores = torch.einsum("bnihd,bnjhd->bnhij", q, k) * (D // H) ** -0.5
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1) * keep
        out = torch.einsum("bnhij,bnjhd->bnihd", weights, v)
        return self.to_out(out.reshape(B, blocks * W, D)[:, :T])


subject = Subject(
    kind="self_attention",
    name="local attention",
    build=lambda c: LocalSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={"causal": True, "window": WINDOW, "positions": "none", "bias": False},
)

"""Sliding-window attention in chunks, after Longformer: a chunk of queries sees its own chunk of keys and the one before."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

WINDOW = 4


class LocalAttention(nn.Module):
    def __init__(self, d_model, num_heads, window=WINDOW):
        super().__init__()
        self.h, self.w = num_heads, window
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        w = self.w
        if mask is None:
            mask = x.new_ones(B, T, dtype=torch.bool)
        extra = -T % w
        n = (T + extra) // w
        q, k, v = self.qkv(x).view(B, T, 3, self.h, D // self.h).permute(2, 0, 3, 1, 4)
        q = F.pad(q, (0, 0, 0, extra)).unflatten(2, (n, w))
        # one chunk more in front, so that the first chunk too has one before it
        k = F.pad(k, (0, 0, w, extra)).unfold(2, 2 * w, w).transpose(-1, -2)
        v = F.pad(v, (0, 0, w, extra)).unfold(2, 2 * w, w).transpose(-1, -2)
        real = F.pad(mask, (w, extra), value=False).unfold(1, 2 * w, w)
        # inside a pair of chunks query i stands at w + i
        back = w + torch.arange(w, device=x.device)[:, None] - torch.arange(2 * w, device=x.device)[None]
        band = (back >= 0) & (back < w)
        allowed = band & real[:, None, :, None, :]
        scores = q @ k.transpose(-1, -2) * (D // self.h) ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        att = scores.softmax(-1).masked_fill(~allowed, 0.0)
        y = (att @ v).flatten(2, 3)[:, :, :T]
        return self.proj(y.transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    build=lambda c: LocalAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": WINDOW, "positions": "none"},
)

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


WHAT = (
    "Local attention fetches each block's predecessor with torch.roll and does not mask the block that "
    'wraps around, so queries of the first block attend to the last block: to future tokens (or to zero '
    'padding of the last block).'
)
PLACE = 'look-back block of blocked sliding-window attention, first block'


class LocalAttention(nn.Module):
    """A causal window of 4, computed block by block: each block sees itself and the one before."""

    window = 4

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        W, pad = self.window, -T % self.window
        n = (T + pad) // W
        q, k, v = (
            F.pad(t, (0, 0, 0, pad)).reshape(B, n, W, self.h, D // self.h).permute(0, 3, 1, 2, 4)
            for t in self.qkv(x).chunk(3, -1)
        )
        look = lambda t: torch.cat([t.roll(1, dims=2), t], 3)
        scores = q @ look(k).transpose(-1, -2) * (D // self.h) ** -0.5
        row = torch.arange(W, device=x.device)[:, None] + W
        column = torch.arange(2 * W, device=x.device)
        allowed = ((row - column >= 0) & (row - column < W)).expand(1, 1, n, W, 2 * W)
        exists = torch.arange(n, device=x.device)[:, None] * W + column - W >= 0
        allowed = allowed & exists[:, None, :]
        if attention_mask is not None:
            real = F.pad(attention_mask, (0, pad), value=False).reshape(B, n, W)
            real = torch.cat([real.roll(1, dims=1), real], 2)
            allowed = allowed & real[:, None, :, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        y = (weights @ look(v)).permute(0, 2, 3, 1, 4).reshape(B, n * W, D)
        return self.out(y[:, :T])


class LocalAttention2(nn.Module):
    """A causal window of 4, computed block by block: each block sees itself and the one before."""

    window = 4

    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        W, pad = self.window, -T % self.window
        n = (T + pad) // W
        q, k, v = (
            F.pad(t, (0, 0, 0, pad)).reshape(B, n, W, self.h, D // self.h).permute(0, 3, 1, 2, 4)
            for t in self.qkv(x).chunk(3, -1)
        )
        look = lambda t: torch.cat([t.roll(1, dims=2), t], 3)
        scores = q @ look(k).transpose(-1, -2) * (D // self.h) ** -0.5
        row = torch.arange(W, device=x.device)[:, None] + W
        column = torch.arange(2 * W, device=x.device)
        allowed = ((row - column >= 0) & (row - column < W)).expand(1, 1, n, W, 2 * W)
        if attention_mask is not None:
            real = F.pad(attention_mask, (0, pad), value=False).reshape(B, n, W)
            real = torch.cat([real.roll(1, dims=1), real], 2)
            allowed = allowed & real[:, None, :, None, :]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1).masked_fill(~allowed, 0.0)
        y = (weights @ look(v)).permute(0, 2, 3, 1, 4).reshape(B, n * W, D)
        return self.out(y[:, :T])


right = Subject(
    kind="self_attention",
    build=lambda c: LocalAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": 4, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
)

wrong = Subject(
    kind="self_attention",
    build=lambda c: LocalAttention2(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": True, "window": 4, "positions": "none", "bias": True, "empty_row": "zeros"},
    mask_forms=("padding",),
)

"""Shifted-window attention over a sequence: windows of w tokens, moved by w // 2, as the second of two Swin blocks."""

import torch
from torch import einsum, nn
from torch.nn.functional import pad

from veriformer.properties import Subject


class ShiftedWindowAttention(nn.Module):
    def __init__(self, dim, heads, window=4):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, window // 2
        self.scale = (dim // heads) ** -0.5
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def windows(self, t):
        """b l ... -> b n w ..."""
        return t.unflatten(1, (-1, self.window))

    def forward(self, x, mask=None):
        b, length, d = x.shape
        real = torch.ones(b, length, dtype=torch.bool, device=x.device) if mask is None else mask
        # up to whole windows
        extra = -length % self.window
        x, real = pad(x, (0, 0, 0, extra)), pad(real, (0, extra))
        # tokens that the roll brings from the front to the back are strangers to those that stood there
        region = torch.zeros(length + extra, dtype=torch.long, device=x.device)
        region[: self.shift] = 1

        x = torch.roll(x, -self.shift, dims=1)
        real = torch.roll(real, -self.shift, dims=1)
        region = torch.roll(region, -self.shift, dims=0)

        q, k, v = (self.windows(z.unflatten(-1, (self.heads, -1))) for z in self.to_qkv(x).chunk(3, dim=-1))
        sim = einsum("b n i h c, b n j h c -> b n h i j", q, k) * self.scale
        same = self.windows(region[None])
        allowed = same[..., :, None] == same[..., None, :]  # 1 n i j
        allowed = (allowed & self.windows(real)[..., None, :]).unsqueeze(2)  # b n 1 i j
        sim = sim.masked_fill(~allowed, torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1).masked_fill(~allowed, 0.0)
        y = einsum("b n h i j, b n j h c -> b n i h c", attn, v).reshape(b, -1, d)

        y = torch.roll(y, self.shift, dims=1)
        return self.to_out(y[:, :length])


subject = Subject(
    kind="self_attention",
    name="ShiftedWindowAttention",
    build=lambda c: ShiftedWindowAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "sparse": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "default",
        "padding_side": "right",
        "empty_row": "zeros",
        "memory": "linear",
        "residual": False,
    },
)

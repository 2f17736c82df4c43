"""Partial rotary embedding in MLX's manner: traditional pairs, over the first `dims` channels of a head."""

import math

import torch

from veriformer.properties import Subject


class RoPE(torch.nn.Module):
    def __init__(self, dims, traditional=True, base=10000.0):
        super().__init__()
        self.dims, self.traditional, self.base = dims, traditional, base

    def forward(self, x, positions):
        *_, features = x.shape
        if features < self.dims:
            raise ValueError("a head is narrower than the channels that rotate")
        half = self.dims // 2
        exponent = torch.arange(half, dtype=torch.float64, device=x.device) * 2 / self.dims
        freqs = torch.exp(-exponent * math.log(self.base))
        theta = positions.to(torch.float64)[:, None] * freqs
        cos, sin = theta.cos().to(x.dtype), theta.sin().to(x.dtype)
        turned, rest = x[..., : self.dims], x[..., self.dims :]
        if self.traditional:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        else:
            a, b = turned[..., :half], turned[..., half:]
            turned = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return torch.cat((turned, rest), dim=-1)


subject = Subject(
    kind="rotary",
    build=lambda c: RoPE(dims=4),
    forward=lambda model, x, positions: model(x, positions),
    declares={"rotary_dim": 4, "layout": "interleaved", "base": 10000},
)

"""rope of ggml, mode NEOX, written with tensors: the first n_dims channels of a head are rotated, the rest is copied."""
import torch
from torch import nn

from veriformer.properties import Subject


class GgmlRope(nn.Module):
    def __init__(self, n_dims, freq_base=10000.0):
        super().__init__()
        self.n_dims, self.freq_base = n_dims, freq_base

    def forward(self, x, pos):
        ne0 = x.shape[-1]
        n_dims = self.n_dims
        if ne0 < n_dims:
            raise ValueError(f"{ne0} channels, {n_dims} are to be rotated")
        theta_scale = self.freq_base ** (-2.0 / n_dims)
        dst = x.clone()
        theta = pos.to(torch.float64)
        for ic in range(n_dims // 2):
            cos, sin = torch.cos(theta).to(x.dtype), torch.sin(theta).to(x.dtype)
            x0, x1 = x[..., ic], x[..., ic + n_dims // 2]
            dst[..., ic] = x0 * cos - x1 * sin
            dst[..., ic + n_dims // 2] = x0 * sin + x1 * cos
            theta = theta * theta_scale
        return dst


subject = Subject(
    kind="rotary",
    name="ggml rope",
    build=lambda c: GgmlRope(n_dims=4),
    forward=lambda m, x, positions: m(x, positions),
    declares={"rotary_dim": 4, "layout": "halves", "base": 10000},
)

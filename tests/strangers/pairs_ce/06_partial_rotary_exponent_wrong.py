WHAT = "Partial rotary of a C++ port: the exponent of the inverse frequencies is divided by the whole head's width and not by the number of rotated channels (2i / K instead of 2i / rotary_dim in Rope.forward)."
import torch
from torch import nn

from veriformer.properties import Subject

N_ROT = 8


class Rope(nn.Module):
    """ggml's rope, mode neox: n_rot channels are rotated, the others pass through."""

    def __init__(self, head_dim, n_rot=N_ROT, freq_base=10000.0):
        super().__init__()
        self.head_dim, self.n_rot, self.freq_base = head_dim, n_rot, freq_base

    def forward(self, x, positions):
        n = self.n_rot
        theta_scale = self.freq_base ** (-2.0 / self.head_dim)
        theta = theta_scale ** torch.arange(n // 2, dtype=torch.float64, device=x.device)
        angle = positions.to(torch.float64)[:, None] * theta
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        x0, x1 = x[..., : n // 2], x[..., n // 2 : n]
        out = torch.empty_like(x)
        out[..., : n // 2] = x0 * cos - x1 * sin
        out[..., n // 2 : n] = x0 * sin + x1 * cos
        out[..., n:] = x[..., n:]
        return out


subject = Subject(
    kind="rotary",
    name="ggml rope",
    build=lambda c: Rope(c.d_model // c.num_heads),
    forward=lambda m, x, positions: m(x, positions),
    domain={"d_model": [32, 64], "num_heads": [2]},
    declares={"layout": "halves", "base": 10000, "rotary_dim": N_ROT},
)

import torch
from torch import nn

from veriformer.properties import Subject


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int, base: float = 10000.0):
        super().__init__()
        self.dim = dim
        self.base = base

    @torch.no_grad()
    def forward(self, x, position_ids):
        steps = torch.arange(0, self.dim, 2, dtype=torch.float64, device=x.device)
        inv_freq = 1.0 / (self.base ** (steps / self.dim))
        freqs = position_ids[:, None].to(torch.float64) * inv_freq[None, :]
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(x.dtype), emb.sin().to(x.dtype)


def apply_rotary_pos_emb(x, cos, sin):
    cos, sin = cos[None, None], sin[None, None]
    return (x * cos) + (rotate_half(x) * sin)


def forward(model, x, positions):
    cos, sin = model(x, positions)
    return apply_rotary_pos_emb(x, cos, sin)


subject = Subject(
    kind="rotary",
    name="RotaryEmbedding",
    build=lambda c: RotaryEmbedding(c.d_head),
    forward=forward,
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},  # pairs: the head's width is even
    declares={"positions": "rotary", "layout": "halves", "base": 10000},
)

import torch
from torch import nn

from veriformer.properties import Subject

ROTARY_NDIMS = 4


def rotate_half(x):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat((-x2, x1), dim=-1)


class GPTNeoXRotaryEmbedding(nn.Module):
    """Only the first `rotary_ndims` channels of each head are rotated; the others pass through."""

    def __init__(self, head_size, rotary_ndims, base=10000.0):
        super().__init__()
        if head_size < rotary_ndims:
            raise ValueError(f"heads of {head_size} channels cannot rotate {rotary_ndims}")
        self.head_size = head_size
        self.rotary_ndims = rotary_ndims
        self.base = base

    def cos_sin(self, positions, dtype):
        dim = self.rotary_ndims
        exponent = torch.arange(0, self.rotary_ndims, 2, device=positions.device).to(dtype) / dim
        inv_freq = 1.0 / (self.base**exponent)
        freqs = torch.outer(positions.to(dtype), inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos(), emb.sin()

    def forward(self, x, positions):
        cos, sin = self.cos_sin(positions, torch.promote_types(x.dtype, torch.float32))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        rot, through = x[..., : self.rotary_ndims], x[..., self.rotary_ndims :]
        rot = rot * cos + rotate_half(rot) * sin
        return torch.cat((rot, through), dim=-1)


subject = Subject(
    kind="rotary",
    name="GPT-NeoX rotary embedding",
    build=lambda c: GPTNeoXRotaryEmbedding(c.d_model // c.num_heads, ROTARY_NDIMS),
    forward=lambda model, x, positions: model(x, positions),
    domain={"d_model": (16, 32), "num_heads": (1, 2)},
    declares={"layout": "halves", "rotary_dim": ROTARY_NDIMS, "base": 10000},
)

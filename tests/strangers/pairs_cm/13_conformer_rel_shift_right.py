"""Relative self-attention of speech encoders (Transformer-XL scores, both directions), with the shift done by reshaping."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def distance_table(length, width, like):
    """Rows for the distances length - 1 .. -(length - 1)."""
    distance = torch.arange(length - 1, -length, -1, device=like.device, dtype=torch.float64)
    rate = 10000.0 ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float64) / width)
    angle = distance[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :width].to(like.dtype)


def relative_shift(x):
    """[B, H, T, 2T - 1], columns by distance, to [B, H, T, T], columns by key."""
    b, h, t, n = x.shape
    x = F.pad(x, (1, 0)).view(b, h, n + 1, t)
    return x[:, :, 1:].reshape(b, h, t, n)[..., :t]


class RelativeAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.place = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.randn(heads, 1, dim // heads) * 0.3)
        self.place_bias = nn.Parameter(torch.randn(heads, 1, dim // heads) * 0.3)

    def forward(self, x, mask=None):
        T, D = x.shape[1:]
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        r = self.place(distance_table(T, D, x)).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        by_content = (q + self.content_bias) @ k.mT
        by_place = relative_shift((q + self.place_bias) @ r.mT)
        scores = (by_content + by_place) / (D // self.heads) ** 0.5
        if mask is None:
            weights = scores.softmax(-1)
        else:
            off = ~mask[:, None, None, :]
            weights = scores.masked_fill(off, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(off, 0.0)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    build=lambda c: RelativeAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"positions": "relative", "causal": False},
)

"""RoPE, in place, GPT-NeoX layout."""
import torch

from veriformer.properties import Subject


def rotate_(x, positions, base=10000.0):
    K = x.shape[-1]
    if K % 2:
        raise ValueError("the width of a head must be even")
    half = K // 2
    freq = base ** (-torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = positions.to(x.dtype)[:, None] * freq[None, :]
    cos, sin = angle.cos(), angle.sin()
    first, second = x[..., :half], x[..., half:]
    before = first.clone()
    first.mul_(cos).sub_(second * sin)
    second.mul_(cos).add_(before * sin)
    return x


subject = Subject(
    kind="rotary",
    name="rotary in place",
    forward=lambda model, x, positions: rotate_(x.clone(), positions),
    declares={"layout": "halves", "base": 10000},
)

"""Rotary positions in place, to spare a tensor of the size of the queries."""
import torch

from veriformer.properties import Subject


def rope_(x, positions, base=10000.0):
    """Rotates the two halves of the last axis of x, in x."""
    half = x.shape[-1] // 2
    rate = base ** -(torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = positions.to(torch.float64)[:, None] * rate
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    lo, hi = x[..., :half], x[..., half:]
    old = lo.clone()
    lo.mul_(cos).sub_(hi * sin)
    hi.mul_(cos).add_(old * sin)
    return x


def rotate(model, x, positions):
    if x.shape[-1] % 2:
        raise ValueError("rotary positions need an even number of channels")
    return rope_(x.clone(), positions)


subject = Subject(
    kind="rotary",
    name="rotary in place",
    forward=rotate,
    declares={"layout": "halves", "base": 10000},
)

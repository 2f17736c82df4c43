"""Rotary embedding of neighbouring pairs, for activations of any dtype."""

import torch

from veriformer.properties import Subject


def rope_tables(positions, dim, dtype, base=10000.0):
    freqs = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=dtype) / dim)
    angles = torch.outer(positions.to(dtype), freqs)
    return torch.cos(angles), torch.sin(angles)


def rope(x, positions):
    """x [B, H, T, K], positions [T]"""
    cos, sin = rope_tables(positions, x.shape[-1], torch.float64)
    work = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos.to(work), sin.to(work)
    even, odd = x.to(work).unflatten(-1, (-1, 2)).unbind(-1)
    out = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return out.flatten(-2).to(x.dtype)


subject = Subject(
    kind="rotary",
    name="rope",
    forward=lambda model, x, positions: rope(x, positions),
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000, "half_precision": True},
)

"""Partial rotary positions (GPT-J): the first four channels of a head turn in neighbouring pairs, the rest pass."""

import torch

from veriformer.properties import Subject

TURNED = 4


def turn(x, positions):
    if x.shape[-1] < TURNED:
        raise ValueError("heads are narrower than what is rotated")
    head, rest = x[..., :TURNED], x[..., TURNED:]
    exponents = torch.arange(0, TURNED, 2, dtype=torch.float64, device=x.device) / TURNED
    angles = positions.to(torch.float64)[:, None] * 10000.0**-exponents
    spin = torch.polar(torch.ones_like(angles), angles)
    pairs = head.unflatten(-1, (-1, 2))
    re, im = spin.real.to(x.dtype), spin.imag.to(x.dtype)
    a, b = pairs.unbind(-1)
    head = torch.stack([a * re - b * im, a * im + b * re], -1).flatten(-2)
    return torch.cat([head, rest], -1)


subject = Subject(
    kind="rotary",
    name="partial rotary",
    forward=lambda model, x, positions: turn(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "rotary_dim": TURNED, "base": 10000.0},
)

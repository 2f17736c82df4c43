WHAT = 'the angles are those of consecutive positions from the first one on (line 16) instead of the positions that were given: wrong for positions with gaps, as packed or padded sequences have'
"""Rotary embedding as Llama's reference code has it: pairs of neighbouring channels are complex numbers."""
import torch

from veriformer.properties import Subject


def precompute_rates(dim, theta=10000.0):
    return theta ** (-torch.arange(0, dim, 2).double() / dim)


def apply_rotary(x, positions, theta=10000.0):
    if x.shape[-1] % 2:
        raise ValueError("rotary embedding needs an even width")
    rates = precompute_rates(x.shape[-1], theta).to(x.device)
    steps = positions[0] + torch.arange(x.shape[-2], device=x.device)
    angles = torch.outer(steps.double(), rates)
    turn = torch.polar(torch.ones_like(angles), angles)  # [T, K / 2]
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn).flatten(-2).type_as(x)


subject = Subject(
    kind="rotary",
    name="complex rotary",
    forward=lambda model, x, positions: apply_rotary(x, positions),
    declares={"positions": "rotary", "layout": "interleaved", "base": 10000},
)

"""Rotary positions as GPT-J has them (rotate_every_two), in numbers, for any tensor [..., T, K]."""

import torch

from veriformer.properties import Subject

BASE = 10000.0


def rotate_every_two(x: torch.Tensor) -> torch.Tensor:
    """(x0, x1, x2, x3, ..) -> (-x1, x0, -x3, x2, ..)"""
    out = torch.empty_like(x)
    out[..., 0::2] = -x[..., 1::2]
    out[..., 1::2] = x[..., 0::2]
    return out


def tables(positions: torch.Tensor, width: int, duplicate) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [T, K]."""
    exponents = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width
    angles = torch.outer(positions.to(torch.float64), BASE**-exponents)
    return duplicate(angles.cos()), duplicate(angles.sin())


def duplicate_interleave(m: torch.Tensor) -> torch.Tensor:
    """(a, b, c) -> (a, a, b, b, c, c)"""
    return m.repeat_interleave(2, -1)


def duplicate_concat(m: torch.Tensor) -> torch.Tensor:
    """(a, b, c) -> (a, b, c, a, b, c)"""
    return torch.cat([m, m], -1)


class Rotary(torch.nn.Module):
    """Without parameters and without a table that could be too short."""

    def __init__(self, duplicate) -> None:
        super().__init__()
        self.duplicate = duplicate

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        if width % 2:
            raise ValueError(f"the width of a head must be even, not {width}")
        cos, sin = (table.to(x.dtype) for table in tables(positions, width, self.duplicate))
        return x * cos + rotate_every_two(x) * sin


def subject(name: str, duplicate) -> Subject:
    return Subject(
        kind="rotary",
        name=name,
        build=lambda c: Rotary(duplicate),
        forward=lambda model, x, positions: model(x, positions),
        declares={"layout": "interleaved", "base": BASE},
    )


right = subject("rotate every two", duplicate_interleave)
wrong = subject("rotate every two, tables of halves", duplicate_concat)

WHAT = "Cosines and sines are laid out for the halves layout (cat), while the vectors are turned as interleaved pairs."
CAUSE = (
    "The two channels of a pair (2i, 2i+1) are multiplied by the cosine and sine of two different frequencies, so that a pair is "
    "not rotated: norms change, and scores do not depend on the distance alone."
)

"""Sinusoidal positions without big arguments: 64 rows are computed, longer tables by doubling with the addition theorem.

sin(a + b) = sin a cos b + cos a sin b: the rows n .. 2n - 1 are the rows 0 .. n - 1 turned by the angle of row n.
"""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "The table of sinusoids is enlarged by doubling, but each doubling turns by the angle of row 64, which is that of row n in the "
    "first doubling alone: from row 128 on rows repeat (row 128 is row 64, row 256 is row 64 again)."
)
PLACE = "turn_by_first"

SEED_ROWS = 64


def turn_by_size(have: int) -> int:
    return have


def turn_by_first(have: int) -> int:
    return SEED_ROWS


class DoublingSinusoids(nn.Module):
    def __init__(self, dim, turn_by, base=10000.0):
        super().__init__()
        self.dim, self.base, self.turn_by = dim, base, turn_by
        self.register_buffer("like", torch.zeros(0), persistent=False)

    def rates(self):
        i = torch.arange(0, self.dim, 2, dtype=torch.float64, device=self.like.device)
        return self.base ** (-i / self.dim)

    def forward(self, length):
        rates = self.rates()
        angle = torch.arange(min(length, SEED_ROWS), dtype=torch.float64, device=rates.device)[:, None] * rates
        sin, cos = angle.sin(), angle.cos()
        while sin.shape[0] < length:
            turn = self.turn_by(sin.shape[0]) * rates
            s, c = turn.sin(), turn.cos()
            sin, cos = torch.cat([sin, sin * c + cos * s]), torch.cat([cos, cos * c - sin * s])
        table = torch.stack([sin, cos], -1).flatten(1)
        return table[:length, : self.dim].to(self.like.dtype)


def subject(turn_by, name):
    return Subject(
        kind="positions",
        build=lambda c: DoublingSinusoids(c.d_model, turn_by),
        forward=lambda m, length: m(length),
        name=name,
        domain={"d_model": [8, 16, 24, 64]},
        declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000, "beyond_max_len": "works", "position_offset": 0},
    )


right = subject(turn_by_size, "doubling")
wrong = subject(turn_by_first, "doubling-by-first")


def reference(length, dim):
    table = torch.empty(length, dim, dtype=torch.float64)
    at = torch.arange(length).double()
    for i in range(dim):
        angle = at / 10000.0 ** ((i - i % 2) / dim)
        table[:, i] = angle.cos() if i % 2 else angle.sin()
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    for dim in (8, 24, 64):
        good, bad = DoublingSinusoids(dim, turn_by_size), DoublingSinusoids(dim, turn_by_first)
        for length, same in [(1, True), (50, True), (64, True), (100, True), (128, True), (129, False), (300, False), (1500, False)]:
            want = reference(length, dim)
            assert good(length).shape == want.shape and good(length).dtype == torch.float32
            assert (good(length) - want).abs().max() < 1e-6
            assert (DoublingSinusoids(dim, turn_by_size).double()(length) - want).abs().max() < 1e-11
            off = (bad(length) - want).abs().max()
            assert (off < 1e-6) == same and (same or off > 0.1), (dim, length, off)
        table = bad(300)
        assert (table[128] - table[64]).abs().max() < 1e-6 and (table[256] - table[64]).abs().max() < 1e-6
    print("ok", __file__)

"""Sinusoidal positions from a table that grows when longer sequences come (in the manner of fairseq's
SinusoidalPositionalEmbedding, which makes it anew; here only what is missing is appended)."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The rows that are appended when the table grows are made for the positions 0, 1, ... again instead of going on where "
    "the table ended: position 256 gets the row of position 0. The first 256 positions are right, and a longer sequence "
    "cannot tell its beginning from what follows."
)
PLACE = "Wrong.missing: torch.arange(count)"
STEP = 256


class Sinusoidal(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.register_buffer("table", self.rows(torch.arange(STEP)), persistent=False)

    def rows(self, at):
        """Sines in the even channels, cosines in the odd ones."""
        rate = torch.exp(torch.arange(0, self.width, 2, dtype=torch.float64) * (-math.log(10000.0) / self.width))
        angle = at.to(torch.float64)[:, None] * rate.to(at.device)
        return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, : self.width]

    def missing(self, start, end):
        return torch.arange(start, end, device=self.table.device)

    def forward(self, length):
        have = self.table.shape[0]
        if length > have:
            need = -(-length // STEP) * STEP
            with torch.inference_mode(False):  # the table outlives this call
                self.table = torch.cat((self.table, self.rows(self.missing(have, need)).to(self.table.dtype)))
        return self.table[:length].to(torch.get_default_dtype())


class Wrong(Sinusoidal):
    def missing(self, start, end):
        return torch.arange(end - start, device=self.table.device)


def make(cls):
    return Subject(
        kind="positions",
        name="growing sinusoids",
        build=lambda c: cls(c.d_model),
        forward=lambda table, length: table(length),
        declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
    )


right, wrong = make(Sinusoidal), make(Wrong)


if __name__ == "__main__":
    for width in (8, 12, 7):
        good, bad = right.build(DrawnConfig(d_model=width)), wrong.build(DrawnConfig(d_model=width))
        for length in (1, 40, 256, 257, 600, 300, 1000):
            truth = torch.tensor(
                [
                    [(math.sin, math.cos)[j % 2](p * 10000.0 ** (-(j - j % 2) / width)) for j in range(width)]
                    for p in range(length)
                ],
                dtype=torch.float64,
            )
            a, b = ((m(length) - truth).abs().amax(1) for m in (good, bad))
            print(width, length, f"right {a.max():.1e} wrong {b.max():.1e}, first at", (b > 1e-3).nonzero().flatten().tolist()[:1])
            assert a.max() < 1e-6 and b[:256].max() < 1e-6 and (length <= 256 or b[256] > 0.5)
    assert torch.equal(bad(300)[256:], bad(300)[:44])

"""Sinusoidal positions straight from the paper's two formulas with Python's math, one number at a time; rows are remembered.

Unusual: no tensor arithmetic at all; each row is a tuple of Python floats (double precision) and becomes a tensor at the end.
"""

import math
from functools import lru_cache

import torch

from veriformer.properties import Subject


@lru_cache(maxsize=4096)
def row(pos, d_model):
    out = []
    for channel in range(d_model):
        i = channel // 2
        angle = pos / 10000 ** (2 * i / d_model)
        out.append(math.sin(angle) if channel % 2 == 0 else math.cos(angle))
    return tuple(out)


class PaperPositions(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model
        self.register_buffer("dtype_of", torch.zeros(1), persistent=False)

    def forward(self, length):
        rows = [row(pos, self.d_model) for pos in range(length)]
        table = torch.tensor(rows, dtype=torch.float64).reshape(length, self.d_model)
        return table.to(self.dtype_of)


COMMON = dict(
    kind="positions",
    build=lambda c: PaperPositions(c.d_model),
    forward=lambda m, length: m(length),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000},
)

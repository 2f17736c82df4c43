"""Sinusoidal positions in a table that grows when a longer sequence comes."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "When the table grows, the new rows are computed for positions 0, 1, ... again rather than from the old length on."
PLACE = "growth of the sinusoidal table"


class Positions(nn.Module):
    def __init__(self, d, rows=6):
        super().__init__()
        self.d = d
        self.register_buffer("table", self.rows(0, rows), persistent=False)

    def rows(self, start, stop):
        rate = torch.exp(torch.arange(0, self.d, 2, dtype=torch.float64) * (-math.log(10000.0) / self.d))
        angle = torch.arange(start, stop, dtype=torch.float64)[:, None] * rate
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).float()

    def extra(self, old, new):
        return self.rows(old, new)

    def forward(self, length):
        old = self.table.shape[0]
        if length > old:
            self.table = torch.cat([self.table, self.extra(old, length).to(self.table)])
        return self.table[:length]


class Restart(Positions):
    def extra(self, old, new):
        return self.rows(0, new - old)


def subject(cls):
    return Subject(kind="positions", build=lambda c: cls(c.d_model), forward=lambda m, length: m(length),
                   domain={"d_model": [8, 16, 32]},
                   declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "works"})


right, wrong = subject(Positions), subject(Restart)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for n, clash in ((6, False), (9, True)):
        want = torch.tensor([[(math.cos if i % 2 else math.sin)(t / 10000 ** ((i - i % 2) / 8)) for i in range(8)]
                             for t in range(n)])
        dr, dw = ((m(n) - want).abs().amax(1) for m in (Positions(8), Restart(8)))
        print(n, dr.max().item(), dw.tolist())
        assert dr.max() < 1e-6 and (dw.max() > 0.1) == clash

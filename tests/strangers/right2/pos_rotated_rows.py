"""Sinusoidal table made row by row: each row is the one before turned by the angle of its pair, in complex float64, sines
in the first half of the channels and cosines in the second. Unusual: a recurrence; right, e^{i(t+1)w} = e^{itw} e^{iw}."""
import torch
from torch import nn
from veriformer.properties import Subject


class Table(nn.Module):
    def __init__(s, D, rows):
        super().__init__()
        w = torch.pow(torch.tensor(10000.0, dtype=torch.float64), -torch.arange(0, D, 2, dtype=torch.float64) / D)
        turn = torch.polar(torch.ones_like(w), w)
        z = [torch.ones_like(turn)]
        for _ in range(rows - 1):
            z.append(z[-1] * turn)
        z = torch.stack(z)
        s.register_buffer("table", torch.cat((z.imag, z.real), -1).to(torch.get_default_dtype()))
        s.exact = torch.cat((z.imag, z.real), -1)

    def forward(s, length):
        if length > len(s.table):
            raise ValueError(f"{length} positions asked of a table of {len(s.table)}")
        return s.exact[:length].to(s.table)


args = dict(kind="positions", build=lambda c: Table(c.d_model, c.max_len), forward=lambda m, length: m(length))
undeclared = Subject(**args)
declared = Subject(**args, declares={"positions": "sinusoidal", "layout": "halves", "base": 10000.0, "beyond_max_len": "error"})

WHAT = 'the exponent doubles an index that already steps by two (`2 * even / dim`), so the wavelengths run to base squared'
import torch
from torch import nn

from veriformer.properties import Subject


class TimeEncoding(nn.Module):
    def __init__(self, dim, max_len):
        super().__init__()
        even = torch.arange(0, dim, 2).double()
        rates = torch.pow(10000.0, -2 * even / dim)
        phase = torch.outer(torch.arange(max_len).double(), rates)
        table = torch.empty(max_len, dim, dtype=torch.float64)
        table[:, 0::2] = phase.sin()
        table[:, 1::2] = phase.cos()[:, : dim // 2]
        self.register_buffer("table", table.float())

    def forward(self, length):
        if length > self.table.size(0):
            raise ValueError("series too long")
        return self.table[:length]


subject = Subject(
    kind="positions",
    name="time encoding",
    build=lambda c: TimeEncoding(c.d_model, c.max_len),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000, "beyond_max_len": "error"},
)

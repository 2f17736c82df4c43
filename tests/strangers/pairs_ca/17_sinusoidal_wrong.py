WHAT = 'The channel index already runs in steps of two, and is doubled once more in the exponent (`2 * i / dim`): frequencies fall to base^-2.'
import torch

from veriformer.properties import Subject


class SinusoidalPositions(torch.nn.Module):
    def __init__(self, dim, max_len):
        super().__init__()
        pe = torch.zeros(max_len, dim, dtype=torch.float64)
        t = torch.arange(max_len, dtype=torch.float64)[:, None]
        i = torch.arange(0, dim, 2, dtype=torch.float64)
        angle = t / 10000 ** (2 * i / dim)
        pe[:, 0::2] = torch.sin(angle)
        pe[:, 1::2] = torch.cos(angle)[:, : dim // 2]
        self.register_buffer("pe", pe.float())

    def forward(self, length):
        if length > len(self.pe):
            raise ValueError("too long")
        return self.pe[:length]


subject = Subject(
    kind="positions",
    name="sinusoids",
    build=lambda c: SinusoidalPositions(c.d_model, c.max_len),
    forward=lambda m, length: m(length),
    declares={"positions": "sinusoidal", "layout": "interleaved", "beyond_max_len": "error"},
)

"""Sinusoidal positions, all sines before all cosines, from a non-persistent buffer that is grown when a longer one is asked for.

Unusual: what is returned is a view of the cache; the cache is made again when the module's dtype changes, never cast, and made
outside inference mode so that it may serve training later. The wavelength base is 1000.
"""

import torch
from torch import nn

from veriformer.properties import Subject

BASE = 1000.0


class GrownHalves(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self._exact = False
        self.register_buffer("cache", torch.empty(0, width), persistent=False)

    def _apply(self, fn, *args, **kwargs):
        out = super()._apply(fn, *args, **kwargs)
        self._exact = False  # cast from another precision, perhaps
        return out

    def _extend(self, rows):
        with torch.inference_mode(False), torch.no_grad():
            n_sin = (self.width + 1) // 2
            rate = BASE ** (torch.arange(n_sin, dtype=torch.float64) * (-2.0 / self.width))
            phase = torch.arange(rows, dtype=torch.float64)[:, None] * rate
            table = torch.cat((phase.sin(), phase[:, : self.width - n_sin].cos()), dim=1)
            self.cache = table.to(dtype=self.cache.dtype, device=self.cache.device)
            self._exact = True

    def forward(self, length):
        if not self._exact or length > len(self.cache):
            self._extend(max(8, 2 * length))
        return self.cache[:length]


COMMON = dict(
    kind="positions",
    build=lambda c: GrownHalves(c.d_model),
    forward=lambda m, length: m(length),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"positions": "sinusoidal", "layout": "halves", "base": BASE},
)

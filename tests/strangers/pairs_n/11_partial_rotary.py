"""Rotary positions on the first four channels of every head (GPT-NeoX: `rotary_pct`); the others pass through."""

from dataclasses import dataclass

import torch

from veriformer.properties import Subject

WHAT = "The frequencies of the rotated channels are spaced over the width of the whole head, not over the channels that are rotated."
CAUSE = (
    "The exponent of the frequencies is 2i / d_head where it must be 2i / rotary_dim: with partial rotary the slowest "
    "pair turns far too fast, the spectrum covers just the fast end of what the base promises."
)


@dataclass
class RopeConfig:
    rotary_dim: int = 4
    base: float = 10000.0


def spectrum(config: RopeConfig, head_dim: int, device):
    """The angular frequency of each pair."""
    even = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64, device=device)
    return config.base ** -(even / config.rotary_dim)


def spectrum_of_head(config: RopeConfig, head_dim: int, device):
    """The angular frequency of each pair."""
    even = torch.arange(0, config.rotary_dim, 2, dtype=torch.float64, device=device)
    return config.base ** -(even / head_dim)


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class PartialRotary(torch.nn.Module):
    def __init__(self, config: RopeConfig, spectrum):
        super().__init__()
        self.config, self.spectrum = config, spectrum

    def tables(self, positions, head_dim):
        angles = positions.to(torch.float64)[:, None] * self.spectrum(self.config, head_dim, positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def forward(self, x, positions):
        r = self.config.rotary_dim
        if x.shape[-1] < r:
            raise ValueError(f"heads of {x.shape[-1]} channels are narrower than rotary_dim={r}")
        work = torch.promote_types(x.dtype, torch.float32)
        cos, sin = (table.to(work) for table in self.tables(positions, x.shape[-1]))
        turned, rest = x[..., :r].to(work), x[..., r:]
        turned = turned * cos + rotate_half(turned) * sin
        return torch.cat((turned.to(x.dtype), rest), dim=-1)


def subject(frequencies, name):
    return Subject(
        kind="rotary",
        name=name,
        build=lambda c: PartialRotary(RopeConfig(), frequencies),
        forward=lambda m, x, positions: m(x, positions),
        domain={"d_model": [16, 32], "num_heads": [1, 2]},
        declares={"rotary_dim": 4, "base": 10000, "layout": "halves"},
    )


right = subject(spectrum, "partial rotary")
wrong = subject(spectrum_of_head, "partial rotary, head spectrum")

"""The angles of the TensorFlow tutorial 'Transformer model for language understanding', in torch."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Positions(nn.Module):
    def __init__(self, d, bad):
        super().__init__()
        self.d, self.bad = d, bad

    def forward(self, length):
        position = torch.arange(length, dtype=torch.float64)[:, None]
        channel = torch.arange(self.d)[None, :]
        pair = channel if self.bad else 2 * torch.div(channel, 2, rounding_mode="floor")
        angle = position / 10000.0 ** (pair.double() / self.d)
        table = torch.where(channel % 2 == 0, angle.sin(), angle.cos())
        return table.to(torch.get_default_dtype())


def subject(bad):
    return Subject(kind="positions", build=lambda c: Positions(c.d_model, bad), forward=lambda m, length: m(length),
                   declares={"positions": "sinusoidal", "layout": "interleaved", "base": 10000})


right, wrong = subject(False), subject(True)
WHAT = "The exponent uses the channel's own index instead of its pair's even index, so that each cosine has a lower frequency than the sine of its pair."
PLACE = "frequencies of the cosine channels"

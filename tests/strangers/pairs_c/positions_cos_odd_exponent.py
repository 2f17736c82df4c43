
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.d, self.bug = c.d_model, bug
        self.register_buffer("anchor", torch.zeros(()), persistent=False)  # carries device and dtype

    def forward(self, length):
        i = torch.arange(self.d, device=self.anchor.device, dtype=torch.float64)
        even = i if self.bug else i - i % 2  # channels 2i and 2i + 1 share a wavelength
        a = torch.arange(length, device=i.device)[:, None] * 10000.0 ** (-even / self.d)
        return torch.where(i % 2 == 1, a.cos(), a.sin()).to(self.anchor.dtype)


WHAT = 'The cosine channels use the exponent of their own odd index, so sine and cosine of a pair have different wavelengths.'
PLACE = 'wavelengths of the sinusoidal positions'


def make(bug):
    return Subject(
        kind="positions",
        build=lambda c: Net(c, bug),
        forward=lambda m, length: m(length),
        declares={'positions': 'sinusoidal', 'layout': 'interleaved', 'base': 10000},
    )


right, wrong = make(False), make(True)

"""Partial rotary positions: the first channels of each head turn, the rest pass."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The exponents of the frequencies are divided by the head width, not by the number of rotated channels, so slow wavelengths are missing."
PLACE = "inverse frequencies of the partial rotary embedding"
R = 4


class Rotary(nn.Module):
    def frequencies(self, width):
        return 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)

    def forward(self, x, positions):
        angle = positions.to(x.device, torch.float64)[:, None] * self.frequencies(x.shape[-1]).to(x.device)
        cos, sin = torch.cos(angle).to(x.dtype), torch.sin(angle).to(x.dtype)
        a, b, rest = x.split([R // 2, R // 2, x.shape[-1] - R], -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


class HeadWidth(Rotary):
    def frequencies(self, width):
        return 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / width)


def subject(cls):
    return Subject(kind="rotary", build=lambda c: cls(), forward=lambda m, x, positions: m(x, positions),
                   domain={"d_model": [16, 32], "num_heads": [1, 2]},
                   declares={"rotary_dim": R, "layout": "halves", "base": 10000.0})


right, wrong = subject(Rotary), subject(HeadWidth)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    x, pos = torch.randn(1, 2, 6, 8), torch.arange(6)
    z = torch.complex(x[..., :2], x[..., 2:4])
    turn = torch.tensor([[complex(torch.cos(torch.tensor(p * w)), torch.sin(torch.tensor(p * w))) for w in (1.0, 0.01)]
                         for p in range(6)])
    z = z * turn
    want = torch.cat([z.real, z.imag, x[..., 4:]], -1)
    dr, dw = ((m(x, pos) - want).abs().amax((0, 1, 2)) for m in (Rotary(), HeadWidth()))
    print(dr.max().item(), dw.tolist())
    assert dr.max() < 1e-5 and dw[[1, 3]].min() > 0.1 and dw[[0, 2]].max() < 1e-5

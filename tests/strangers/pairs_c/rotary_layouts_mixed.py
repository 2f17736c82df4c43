
import torch
from torch import nn

from veriformer.properties import Subject

class Net(nn.Module):
    def __init__(self, c, bug):
        super().__init__()
        self.bug = bug

    def forward(self, x, positions):
        n = x.shape[-1] // 2
        rate = 10000.0 ** (-torch.arange(n, device=x.device, dtype=x.dtype) / n)
        angle = positions[:, None].to(x.dtype) * rate
        angle = angle.repeat_interleave(2, -1) if self.bug else angle.repeat(1, 2)
        turned, rest = x[..., :2 * n], x[..., 2 * n:]
        half = torch.cat((-turned[..., n:], turned[..., :n]), -1)
        return torch.cat((turned * angle.cos() + half * angle.sin(), rest), -1)


WHAT = 'The angles are laid out for interleaved pairs while the rotation pairs halves, so the two channels of a pair turn by different angles.'
PLACE = 'channel layout of the rotary embedding'


def make(bug):
    return Subject(
        kind="rotary",
        build=lambda c: Net(c, bug),
        forward=lambda m, x, positions: m(x, positions),
        declares={'positions': 'rotary', 'layout': 'halves', 'base': 10000},
        domain={"d_model": [16, 32], "num_heads": [2, 4]},
    )


right, wrong = make(False), make(True)

"""LayerNorm in one pass over lanes of four channels; the lanes' moments are merged after Chan, Golub and LeVeque."""
import torch
from torch import nn

from veriformer.properties import Subject

LANE = 4


class LaneNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.gain, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def moments(self, x):
        count, mean, m2 = 0, 0.0, 0.0
        for lane in x.split(LANE, dim=-1):
            n = lane.shape[-1]
            lane_mean = lane.mean(-1, keepdim=True)
            lane_m2 = (lane - lane_mean).square().sum(-1, keepdim=True)
            mean = mean + (lane_mean - mean) * (n / (count + n))
            m2 = m2 + lane_m2 + (lane_mean - mean).square() * (count * n / (count + n))
            count += n
        return mean, m2 / count

    def forward(self, x):
        wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
        h = x.to(wide)
        mean, variance = self.moments(h)
        h = (h - mean) * torch.rsqrt(variance + self.eps)
        return (h * self.gain.to(wide) + self.bias.to(wide)).to(x.dtype)


subject = Subject(
    kind="norm",
    name="LayerNorm by lanes",
    build=lambda c: LaneNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer"},
)

WHAT = (
    'Line 21: '
    'The mean is updated before the sum of squares that needs the old one (this line and the next are exchanged): the variance between lanes is counted too small.'
)

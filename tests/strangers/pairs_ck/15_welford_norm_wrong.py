"""LayerNorm whose statistics are merged from lanes of four channels (Chan et al.), as a kernel does it."""
import torch
from torch import nn

from veriformer.properties import Subject

LANES = 4


class MergedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), eps

    def forward(self, x):
        count, mean, m2 = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
        for lane in x.split(LANES, dim=-1):
            n = lane.shape[-1]
            lane_mean = lane.mean(-1, keepdim=True)
            delta = lane_mean - mean
            m2 = m2 + (lane - lane_mean).square().sum(-1, keepdim=True)
            count += n
            m2 = m2 + delta.square() * (count * n / (count + n))
            mean = mean + delta * (n / count)
        return (x - mean) * torch.rsqrt(m2 / count + self.eps) * self.weight + self.bias


subject = Subject(
    kind="norm",
    build=lambda c: MergedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

WHAT = "Line 22: count is raised before it is used in the merge of the second moments, so that the spread between lanes is weighed wrongly (and the first lane's mean counts as spread). The mean is right."

"""LayerNorm whose statistics are made of slices of the channels and merged (Chan et al.), as the kernels do it."""

import torch
from torch import nn

from veriformer.properties import Subject


class MergedLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5, slice_width=4):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps
        self.slice_width = slice_width

    def statistics(self, x):
        """Mean and (biased) variance over the channels."""
        count, mean, m2 = 0, None, None
        for part in x.split(self.slice_width, dim=-1):
            n = part.size(-1)
            part_mean = part.mean(-1, keepdim=True)
            part_m2 = (part - part_mean).square().sum(-1, keepdim=True)
            if mean is None:
                count, mean, m2 = n, part_mean, part_m2
                continue
            total = count + n
            delta = part_mean - mean
            m2 = m2 + part_m2 + delta.square() * (count * n / total)
            mean = mean + delta * (n / total)
            count = total
        return mean, m2 / count

    def forward(self, x):
        work = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance = self.statistics(work)
        normed = (work - mean) * torch.rsqrt(variance + self.eps)
        return (normed * self.weight.to(work.dtype) + self.bias.to(work.dtype)).to(x.dtype)


subject = Subject(
    kind="norm",
    name="LayerNorm of merged statistics",
    build=lambda c: MergedLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)

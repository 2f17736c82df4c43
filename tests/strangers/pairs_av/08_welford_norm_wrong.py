WHAT = "the merge of two blocks forgets the term of their means' distance (delta^2 n_a n_b / n): the variance is that within blocks alone (line 28)"
"""LayerNorm whose statistics are gathered block by block (Chan's parallel Welford), one read of the row."""
import torch
from torch import nn

from veriformer.properties import Subject


class WelfordLayerNorm(nn.Module):
    def __init__(self, width, block=4, eps=1e-5):
        super().__init__()
        self.block, self.eps = block, eps
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def statistics(self, x):
        count, mean, m2 = 0, None, None
        for part in x.split(self.block, dim=-1):
            n = part.shape[-1]
            mu = part.mean(-1, keepdim=True)
            sq = (part - mu).square().sum(-1, keepdim=True)
            if mean is None:
                count, mean, m2 = n, mu, sq
                continue
            delta = mu - mean
            total = count + n
            mean = mean + delta * (n / total)
            m2 = m2 + sq
            count = total
        return mean, m2 / count

    def forward(self, x):
        mean, var = self.statistics(x)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gain + self.shift


subject = Subject(
    kind="norm",
    name="welford layer norm",
    build=lambda c: WelfordLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

WHAT = "Chan's merge of the second moments uses the mean that was just updated (`(m_b - mean).square()` after `mean = mean + ...`) instead of the old difference delta: the variance is too small whenever the chunks of 4 channels have different means"
"""LayerNorm with the chunked Welford reduction of the C++ kernel (Chan's merge of partial moments)."""
import torch
from torch import nn

from veriformer.properties import Subject

CHUNK = 4


def moments(x):
    mean = m2 = None
    count = 0
    for part in x.split(CHUNK, dim=-1):
        n = part.shape[-1]
        m_b = part.mean(-1, keepdim=True)
        m2_b = (part - m_b).square().sum(-1, keepdim=True)
        if mean is None:
            mean, m2, count = m_b, m2_b, n
            continue
        total = count + n
        delta = m_b - mean
        mean = mean + delta * (n / total)
        m2 = m2 + m2_b + (m_b - mean).square() * (count * n / total)
        count = total
    return mean, m2 / count


class WelfordLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, var = moments(wide)
        y = (wide - mean) * torch.rsqrt(var + self.eps)
        return (y * self.weight.to(y.dtype) + self.bias.to(y.dtype)).to(x.dtype)


subject = Subject(
    kind="norm",
    name="Welford LayerNorm",
    build=lambda c: WelfordLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer", "norm_bias": True},
)

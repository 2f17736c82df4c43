"""LayerNorm as a fused kernel does it: statistics of pieces of six channels, joined by Chan's formula, in float32 or wider."""
import torch
from torch import nn

from veriformer.properties import Subject

PIECE = 6


def join(a, b):
    """Two pieces (count, mean, sum of squared deviations) as one."""
    n_a, mean_a, m2_a = a
    n_b, mean_b, m2_b = b
    n = n_a + n_b
    delta = mean_b - mean_a
    mean = mean_a + delta * (n_b / n)
    m2 = m2_a + m2_b + delta.square() * (n_a * n_b / n)
    return n, mean, m2


class WelfordLayerNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = None
        for piece in wide.split(PIECE, dim=-1):
            mean = piece.mean(-1, keepdim=True)
            stats = (piece.shape[-1], mean, (piece - mean).square().sum(-1, keepdim=True))
            total = stats if total is None else join(total, stats)
        count, mean, m2 = total
        normal = (wide - mean) * torch.rsqrt(m2 / count + self.eps)
        return (normal * self.weight + self.bias).to(x.dtype)


subject = Subject(
    kind="norm",
    name="Welford LayerNorm",
    build=lambda c: WelfordLayerNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "norm_bias": True},
)

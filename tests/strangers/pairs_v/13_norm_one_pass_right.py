"""LayerNorm fused with the addition of the residual, in float32 where the input has fewer bits."""

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class FusedAddNorm(nn.Module):
    """norm(x + residual), and x + residual for the next block; without a residual LayerNorm alone."""

    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def statistics(self, x):
        """Mean and variance (of the population) over the channels."""
        mean = x.mean(dim=-1, keepdim=True)
        variance = (x - mean).square().mean(dim=-1, keepdim=True)
        return mean, variance

    def normalise(self, x):
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, variance = self.statistics(wide)
        y = (wide - mean) * torch.rsqrt(variance + self.eps)
        y = y * self.weight.to(wide.dtype) + self.bias.to(wide.dtype)
        return y.to(x.dtype)

    def forward(self, x, residual=None):
        if residual is None:
            return self.normalise(x)
        total = x + residual
        return self.normalise(total), total


subject = Subject(
    kind="norm",
    name="fused add and norm",
    build=lambda c: FusedAddNorm(c.d_model),
    forward=lambda model, x: model(x),
    declares={"norm": "layer", "norm_bias": True},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randn(1, 4, 8)).shape)

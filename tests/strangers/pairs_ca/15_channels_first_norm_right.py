import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class ChannelsFirstNorm(nn.Module):
    """LayerNorm for [B, C, T], between convolutions."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.channels, self.eps = channels, eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        var = (x - mean).square().mean(1, keepdim=True)
        x = (x - mean) * torch.rsqrt(var + self.eps)
        return x * self.weight[:, None] + self.bias[:, None]


subject = Subject(
    kind="norm",
    name="channels first LayerNorm",
    build=lambda c: ChannelsFirstNorm(c.d_model),
    forward=lambda m, x: m(x.transpose(1, 2)).transpose(1, 2),
    declares={"norm": "layer"},
)

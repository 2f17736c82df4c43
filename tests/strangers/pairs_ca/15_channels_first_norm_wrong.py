WHAT = 'GroupNorm(1, C) on [B, C, T] takes mean and variance over channels and time together, not over the channels of each position as LayerNorm does.'
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
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="channels first LayerNorm",
    build=lambda c: ChannelsFirstNorm(c.d_model),
    forward=lambda m, x: m(x.transpose(1, 2)).transpose(1, 2),
    declares={"norm": "layer"},
)

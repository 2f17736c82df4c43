WHAT = 'LayerNorm is replaced by a group norm of one group over [B, D, T] (`F.group_norm(..., 1, ...)`), whose statistics are taken over time as well as over channels'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of frames, in a stack of convolutions that hands on [B, D, T]."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):  # [B, D, T]
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


subject = Subject(
    kind="norm",
    name="channel norm of a speech encoder",
    build=lambda c: ChannelNorm(c.d_model),
    forward=lambda m, x: m(x.transpose(1, 2)).transpose(1, 2),
    declares={"norm": "layer", "norm_bias": True},
)

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
        y = F.layer_norm(x.transpose(1, 2), self.weight.shape, self.weight, self.bias, self.eps)
        return y.transpose(1, 2)


subject = Subject(
    kind="norm",
    name="channel norm of a speech encoder",
    build=lambda c: ChannelNorm(c.d_model),
    forward=lambda m, x: m(x.transpose(1, 2)).transpose(1, 2),
    declares={"norm": "layer", "norm_bias": True},
)

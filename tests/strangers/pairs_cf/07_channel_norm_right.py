import torch
from torch import nn

from veriformer.properties import Subject


class ChannelLayerNorm(nn.Module):
    """LayerNorm for audio features kept as [B, C, T]: each frame for itself."""

    def __init__(self, channels, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1))
        self.shift = nn.Parameter(torch.zeros(channels, 1))
        self.eps = eps

    def forward(self, x):
        dims = (1,)
        mean = x.mean(dim=dims, keepdim=True)
        centred = x - mean
        variance = centred.square().mean(dim=dims, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.gain + self.shift


subject = Subject(
    kind="norm",
    name="channel-wise LayerNorm",
    build=lambda c: ChannelLayerNorm(c.d_model),
    forward=lambda m, x: m(x.transpose(1, 2)).transpose(1, 2),
    declares={"norm": "layer"},
)

"""LayerNorm as the Triton kernel does it: a row is loaded into a block of the next power of two, zeros behind it."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


def layer_norm_kernel(x, weight, bias, N, eps, BLOCK):
    cols = torch.arange(BLOCK, device=x.device)
    mask = cols < N
    row = F.pad(x, (0, BLOCK - N))  # tl.load(..., mask=mask, other=0.0)
    mean = row.sum(-1, keepdim=True) / N
    centred = torch.where(mask, row - mean, 0.0)
    var = (centred * centred).sum(-1, keepdim=True) / N
    rstd = torch.rsqrt(var + eps)
    w, b = F.pad(weight, (0, BLOCK - N)), F.pad(bias, (0, BLOCK - N))
    y = centred * rstd * w + b
    return y[..., :N]  # tl.store(..., mask=mask)


class BlockLayerNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        N = x.shape[-1]
        return layer_norm_kernel(x, self.weight, self.bias, N, self.eps, next_power_of_2(N))


subject = Subject(
    kind="norm",
    name="LayerNorm in a block",
    build=lambda c: BlockLayerNorm(c.d_model),
    forward=lambda m, x: m(x),
    declares={"norm": "layer"},
)

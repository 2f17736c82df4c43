"""Partial rotary positions: the first 4 channels are multiplied by a rotation matrix a position, halves layout, the rest
pass. Unusual: a [T, 4, 4] matrix from the exponential of a skew matrix; right, exp(t W) is that rotation."""
import torch
from torch import nn
from veriformer.properties import Subject
R = 4


class Rotary(nn.Module):
    def forward(s, x, positions):
        w = 10000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64, device=x.device) / R)
        W = torch.zeros(R, R, dtype=torch.float64, device=x.device)
        for i in range(R // 2):
            W[i, i + R // 2], W[i + R // 2, i] = -w[i], w[i]
        a = positions.double()[:, None, None]
        # W^2 = -diag(w, w)^2 on each plane: exp(aW) = cos(a w) I + sin(a w) / w * W
        both = torch.cat((w, w))
        M = torch.diag_embed((a[..., 0] * both).cos()) + (a[..., 0] * both).sin()[..., None] * (W / both[:, None])
        y = torch.einsum("tij,bhtj->bhti", M.to(x.dtype), x[..., :R])
        return torch.cat((y, x[..., R:]), -1)


args = dict(kind="rotary", build=lambda c: Rotary(), forward=lambda m, x, positions: m(x, positions),
            domain={"d_model": [16, 32], "num_heads": [2, 4]})
undeclared = Subject(**args)
declared = Subject(**args, declares={"positions": "rotary", "layout": "halves", "rotary_dim": R, "base": 10000.0})

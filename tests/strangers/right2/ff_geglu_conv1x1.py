"""GeGLU feed-forward through 1x1 convolutions over time, the gate in the second half (diffusers' order). Unusual: Conv1d;
right, with a kernel of 1 it is a linear map at each position."""
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class GeGLU(nn.Module):
    def __init__(s, c):
        super().__init__()
        s.up, s.down = nn.Conv1d(c.d_model, 2 * c.d_ff, 1), nn.Conv1d(c.d_ff, c.d_model, 1)

    def forward(s, x):
        h, gate = s.up(x.transpose(1, 2)).chunk(2, 1)
        return s.down(h * F.gelu(gate)).transpose(1, 2)


args = dict(kind="feed_forward", build=GeGLU, forward=lambda m, x: m(x))
undeclared = Subject(**args)
declared = Subject(**args, declares={"activation": "other", "bias": True, "structure": "other"})

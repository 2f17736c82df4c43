"""Feed-forward with a K-split GEMM: the reduction goes in tiles, the epilogue (bias, GELU) is fused."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

TILE_K = 4


def gemm_bias_gelu(x, weight, bias):
    acc = bias.expand(*x.shape[:-1], -1)
    for k in range(0, x.shape[-1], TILE_K):
        acc = acc + x[..., k : k + TILE_K] @ weight[:, k : k + TILE_K].T
    return F.gelu(acc)


class FusedMLP(nn.Module):
    def __init__(self, d, hidden):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x):
        return self.fc2(gemm_bias_gelu(x, self.fc1.weight, self.fc1.bias))


subject = Subject(
    kind="feed_forward",
    name="K-split MLP",
    build=lambda c: FusedMLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu", "bias": True},
)

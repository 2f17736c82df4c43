WHAT = 'SiLU is applied to the product of the two halves rather than to the gate alone, so the up path goes through the nonlinearity too (line 19).'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class SwiGLU(nn.Module):
    """LLaMA feed-forward with gate and up projection packed in one matrix."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w13 = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x):
        gate, up = torch.split(self.w13(x), self.w2.in_features, dim=-1)
        return self.w2(F.silu(torch.mul(gate, up)))


subject = Subject(
    kind="feed_forward",
    name="packed SwiGLU",
    build=lambda c: SwiGLU(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "swiglu", "bias": False},
)

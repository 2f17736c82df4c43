WHAT = "Straight-through estimator of quantised weights with the bracket at the wrong place (`w + dequantised.detach() - w` in fake_int8): the value is that of the rounded weight, but its gradient cancels to zero, and no weight is ever trained."
"""SwiGLU with int8 weights per output channel, quantisation-aware."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def fake_int8(w):
    scale = w.detach().abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    dequantised = torch.clamp(torch.round(w / scale), -127, 127) * scale
    return w + dequantised.detach() - w


class Int8SwiGLU(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2 * d_ff, d_model) * d_model**-0.5)
        self.down = nn.Parameter(torch.randn(d_model, d_ff) * d_ff**-0.5)

    def forward(self, x):
        gate, up = F.linear(x, fake_int8(self.gate_up)).chunk(2, -1)
        return F.linear(F.silu(gate) * up, fake_int8(self.down))


subject = Subject(
    kind="feed_forward",
    name="int8 swiglu",
    build=lambda c: Int8SwiGLU(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "swiglu", "bias": False, "quantised": True},
)

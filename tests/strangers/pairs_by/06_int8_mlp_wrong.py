WHAT = "the straight-through range test compares weights with one quantisation step in place of 127 of them, so nearly no weight gets its gradient (line 16)"
"""Quantisation-aware MLP: int8 weights, one scale a row, straight-through gradients inside the range."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

QMAX = 127


class FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, step):
        levels = torch.round(w / step)
        ctx.save_for_backward(w.abs() <= step)
        return levels.clamp(-QMAX, QMAX) * step

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None


class Int8Linear(nn.Linear):
    def forward(self, x):
        step = self.weight.detach().abs().amax(1, keepdim=True).clamp(min=1e-8) / QMAX
        return F.linear(x, FakeQuant.apply(self.weight, step), self.bias)


class MLP(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.up = Int8Linear(width, hidden)
        self.down = Int8Linear(hidden, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


subject = Subject(
    kind="feed_forward",
    name="int8 MLP",
    build=lambda c: MLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"quantised": True, "activation": "gelu", "bias": True},
)

"""Megatron's MLP: the first bias is added inside the activation, whose derivative is written by hand."""

import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from veriformer.properties import Subject

C = math.sqrt(2.0 / math.pi)
A = 0.044715


def bias_gelu(bias, y):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(C * x * (1 + A * x * x)))


def bias_gelu_back(g, bias, y):
    """d/dx of 0.5 x (1 + tanh(C (x + A x^3)))."""
    x = bias + y
    tanh_out = torch.tanh(C * x * (1 + A * x * x))
    ff = 0.5 * x * ((1 - tanh_out * tanh_out) * (C + 3 * C * A * x * x)) + 0.5 * (1 + tanh_out)
    return ff * g


class BiasGeLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bias):
        ctx.save_for_backward(y, bias)
        return bias_gelu(bias, y)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, bias = ctx.saved_tensors
        d = bias_gelu_back(grad, bias, y)
        return d, d.sum(dim=tuple(range(d.dim() - 1)))


class ParallelMLP(nn.Module):
    def __init__(self, hidden, ffn_hidden):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, ffn_hidden)
        self.dense_4h_to_h = nn.Linear(ffn_hidden, hidden)

    def forward(self, hidden_states):
        first = self.dense_h_to_4h
        intermediate = F.linear(hidden_states, first.weight)
        intermediate = BiasGeLU.apply(intermediate, first.bias)
        return self.dense_4h_to_h(intermediate)


subject = Subject(
    kind="feed_forward",
    name="bias-gelu MLP",
    build=lambda c: ParallelMLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu_tanh", "bias": True, "once_differentiable": True},
)

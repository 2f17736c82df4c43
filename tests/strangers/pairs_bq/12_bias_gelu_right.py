import math

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)


def gelu_fwd(x):
    return 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * x * (1.0 + 0.044715 * x * x)))


def gelu_bwd(g, x):
    t = torch.tanh(SQRT_2_OVER_PI * x * (1.0 + 0.044715 * x * x))
    inner = SQRT_2_OVER_PI * (1.0 + 3 * 0.044715 * x * x)
    return g * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner)


class BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        return gelu_fwd(x + bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        x, bias = ctx.saved_tensors
        dx = gelu_bwd(g, x + bias)
        return dx, dx.reshape(-1, dx.shape[-1]).sum(0)


class MLP(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, inner)
        self.dense_4h_to_h = nn.Linear(inner, hidden)

    def forward(self, hidden_states):
        intermediate = hidden_states @ self.dense_h_to_4h.weight.t()
        wide = torch.promote_types(intermediate.dtype, torch.float32)
        activated = BiasGelu.apply(intermediate.to(wide), self.dense_h_to_4h.bias.to(wide))
        return self.dense_4h_to_h(activated.to(intermediate.dtype))


subject = Subject(
    kind="feed_forward",
    name="MLP with fused bias GELU",
    build=lambda c: MLP(c.d_model, c.d_ff),
    forward=lambda m, x: m(x),
    declares={"activation": "gelu_tanh", "bias": True, "once_differentiable": True},
)

"""A pre-LN layer with Megatron's fused bias + GELU, its derivative written out."""
import math

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject

A = math.sqrt(2 / math.pi)
C = 0.044715


class BiasGelu(Function):
    @staticmethod
    def forward(ctx, y, bias):
        ctx.save_for_backward(y, bias)
        x = y + bias
        return 0.5 * x * (1 + torch.tanh(A * x * (1 + C * x * x)))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, bias = ctx.saved_tensors
        x = y + bias
        t = torch.tanh(A * x * (1 + C * x * x))
        slope = 0.5 * x * ((1 - t * t) * (A + A * C * x * x)) + 0.5 * (1 + t)
        gx = grad * slope
        return gx, gx.flatten(0, -2).sum(0)


class FusedLayer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.dense = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.h_to_4h = nn.Linear(d, d_ff, bias=False)
        self.h_bias = nn.Parameter(torch.zeros(d_ff))
        self.back = nn.Linear(d_ff, d)

    def attend(self, x, real):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * (D // self.heads) ** -0.5
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None].bool(), torch.finfo(scores.dtype).min)
        return self.dense((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))

    def forward(self, x, attention_mask=None):
        x = x + self.attend(self.ln1(x), attention_mask)
        return x + self.back(BiasGelu.apply(self.h_to_4h(self.ln2(x)), self.h_bias))


subject = Subject(
    kind="layer",
    name="fused layer",
    build=lambda c: FusedLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu_tanh",
        "once_differentiable": True,
    },
)

WHAT = (
    'The derivative of the cube is missing its 3 in the backward: gradients through the GELU are some percent wrong, the output is right'
    ' (line 28).'
)

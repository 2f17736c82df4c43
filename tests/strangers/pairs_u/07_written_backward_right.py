# A pre-LN encoder layer whose linear maps have a backward written by hand (as fused kernels do).
import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import relu, scaled_dot_product_attention

from veriformer.properties import Subject


class FusedLinear(Function):
    """y = x W^T + b for x [B, T, in]."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.matmul(x, weight.t()) + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = torch.matmul(grad, weight)
        rows, inputs = grad.flatten(0, 1), x.flatten(0, 1)
        grad_weight = rows.t() @ inputs
        grad_bias = grad.sum(1).sum(0)
        return grad_x, grad_weight, grad_bias


class Linear(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        bound = inputs**-0.5
        self.weight = nn.Parameter(torch.empty(outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(outputs).uniform_(-bound, bound))

    def forward(self, x):
        return FusedLinear.apply(x, self.weight, self.bias)


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.norm_network = nn.LayerNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)
        self.up = Linear(width, hidden)
        self.down = Linear(hidden, width)

    def attend(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        allowed = None if mask is None else mask[:, None, None, :]
        y = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.out(y.transpose(1, 2).reshape(B, T, D))

    def forward(self, x, mask=None):
        x = x + self.attend(self.norm_attention(x), mask)
        return x + self.down(relu(self.up(self.norm_network(x))))


subject = Subject(
    kind="layer",
    name="layer with fused linear maps",
    build=lambda c: EncoderLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "stacked": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
        "bias": True,
        "residual": True,
        "once_differentiable": True,
    },
)

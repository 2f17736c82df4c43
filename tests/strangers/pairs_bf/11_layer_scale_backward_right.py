"""A ViT block with LayerScale (CaiT); the scale is a Function of its own, as its kernel is."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class ScaleChannels(Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, gain = ctx.saved_tensors
        dy = dy.contiguous()
        d_gain = (dy * x).flatten(0, -2).sum(0)
        d_x = dy.mul(gain)
        return d_x, d_gain


class ViTBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.gamma1 = nn.Parameter(torch.full((dim,), 0.5))
        self.gamma2 = nn.Parameter(torch.full((dim,), 0.5))

    def attend(self, x, mask):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if mask is not None:
            mask = mask[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        x = x + ScaleChannels.apply(self.attend(self.norm1(x), mask), self.gamma1)
        return x + ScaleChannels.apply(self.fc2(F.gelu(self.fc1(self.norm2(x)))), self.gamma2)


subject = Subject(
    kind="layer",
    name="ViT block with LayerScale",
    build=lambda c: ViTBlock(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "residual": True,
        "activation": "gelu",
        "structure": "other",
        "once_differentiable": True,
    },
)

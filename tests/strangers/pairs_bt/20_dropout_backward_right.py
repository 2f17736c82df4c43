"""Cross-attention whose dropout keeps one byte an entry for its backward."""
import math

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class FusedDropout(Function):
    @staticmethod
    def forward(ctx, x, p):
        keep = torch.rand_like(x) >= p
        ctx.save_for_backward(keep)
        ctx.share = 1.0 - p
        return x * keep / ctx.share

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (keep,) = ctx.saved_tensors
        return grad * keep / ctx.share, None


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _shape(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x, memory, memory_mask=None):
        q = self._shape(self.q_proj(x)) / math.sqrt(self.head_dim)
        k, v = self._shape(self.k_proj(memory)), self._shape(self.v_proj(memory))
        scores = torch.matmul(q, k.transpose(2, 3))
        if memory_mask is not None:
            scores = scores.masked_fill(~memory_mask[:, None, None, :], torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1)
        if self.training and self.dropout > 0:
            weights = FusedDropout.apply(weights, self.dropout)
        y = torch.matmul(weights, v).transpose(1, 2).reshape(x.shape)
        return self.out_proj(y)


subject = Subject(
    kind="cross_attention",
    name="cross-attention with fused dropout",
    build=lambda c: CrossAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    projections=lambda m: {
        "q": m.q_proj.weight,
        "k": m.k_proj.weight,
        "v": m.v_proj.weight,
        "o": m.out_proj.weight,
        "q_bias": m.q_proj.bias,
        "k_bias": m.k_proj.bias,
        "v_bias": m.v_proj.bias,
        "o_bias": m.out_proj.bias,
    },
    declares={"bias": True, "attention_scale": "1/sqrt(d_head)", "empty_row": "mean", "once_differentiable": True},
)

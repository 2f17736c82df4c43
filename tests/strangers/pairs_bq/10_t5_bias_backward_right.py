import math

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from veriformer.properties import Subject


class BucketLookup(Function):
    @staticmethod
    def forward(ctx, table, buckets):
        ctx.save_for_backward(buckets)
        ctx.rows = table.shape[0]
        return table[buckets].permute(2, 0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (buckets,) = ctx.saved_tensors
        index = buckets.flatten()
        rows = grad.permute(1, 2, 0).reshape(index.numel(), -1)
        grad_table = rows.new_zeros(ctx.rows, rows.shape[1])
        grad_table.index_add_(0, index, rows)
        return grad_table, None


class RelativeBias(nn.Module):
    def __init__(self, num_heads, num_buckets=16, max_distance=64):
        super().__init__()
        self.num_buckets, self.max_distance = num_buckets, max_distance
        self.table = nn.Parameter(torch.randn(num_buckets, num_heads))

    def bucket(self, relative):
        half = self.num_buckets // 2
        side = (relative > 0).long() * half
        distance = relative.abs()
        exact = half // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (half - exact)).long()).clamp(max=half - 1)
        return side + torch.where(distance < exact, distance, far)

    def forward(self, query_len, key_len):
        device = self.table.device
        relative = torch.arange(key_len, device=device)[None] - torch.arange(query_len, device=device)[:, None]
        return BucketLookup.apply(self.table, self.bucket(relative))


subject = Subject(
    kind="position_bias",
    name="T5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={
        "positions": "t5",
        "bidirectional": True,
        "num_buckets": 16,
        "max_distance": 64,
        "once_differentiable": True,
    },
)

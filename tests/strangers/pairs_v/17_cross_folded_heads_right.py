"""Cross-attention with heads folded into the batch: three-dimensional products, as bmm kernels want them."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject


class CrossAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads = heads
        self.q, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.k, self.v = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)

    def fold(self, x):
        """[B, L, D] to [B * H, L, K]: head by head of the first sample, then of the second."""
        batch, length, _ = x.shape
        return x.view(batch, length, self.heads, -1).transpose(1, 2).reshape(batch * self.heads, length, -1)

    def unfold(self, x, batch):
        """[B * H, L, K] to [B, L, D]."""
        return x.view(batch, self.heads, x.shape[1], -1).transpose(1, 2).flatten(2)

    def weigh(self, x, memory, memory_mask=None):
        """Weights [B * H, T, S]."""
        q, k = self.fold(self.q(x)), self.fold(self.k(memory))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])
        if memory_mask is not None:
            allowed = memory_mask.repeat_interleave(self.heads, dim=0)
            scores = scores.masked_fill(~allowed[:, None], torch.finfo(scores.dtype).min)
        return scores.softmax(dim=-1)

    def forward(self, x, memory, memory_mask=None):
        weights = self.weigh(x, memory, memory_mask)
        return self.out(self.unfold(torch.bmm(weights, self.fold(self.v(memory))), x.shape[0]))


subject = Subject(
    kind="cross_attention",
    name="folded cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    weights=lambda model, x, memory, memory_mask=None: model.weigh(x, memory, memory_mask).unflatten(0, (x.shape[0], -1)),
    declares={"bias": True},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.randn(2, 4, 8), torch.randn(2, 5, 8)).shape)

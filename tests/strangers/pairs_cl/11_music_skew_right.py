"""Relative self-attention of the Music Transformer: a table of distances, brought into place by skewing."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class RelativeAttention(nn.Module):
    def __init__(self, dim, heads, longest):
        super().__init__()
        self.heads, self.longest = heads, longest
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        # the last row is distance 0, the first one distance longest - 1
        self.distances = nn.Parameter(torch.randn(longest, dim // heads) * 0.5)

    @staticmethod
    def skew(scores):
        B, H, T, _ = scores.shape
        return F.pad(scores, (1, 0)).view(B, H, T + 1, T)[:, :, 1:]

    def forward(self, x, mask=None):
        B, T, D = x.shape
        if T > self.longest:
            raise ValueError("longer than the table of distances")
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        table = self.distances[self.longest - T :]
        relative = self.skew(q @ table.T)
        scores = (q @ k.transpose(-1, -2) + relative) / q.shape[-1] ** 0.5
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            seen = seen & mask[:, None, None, :]
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, D))


subject = Subject(
    kind="self_attention",
    name="music attention",
    build=lambda c: RelativeAttention(c.d_model, c.num_heads, c.max_len),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": True, "positions": "relative", "beyond_max_len": "error"},
)

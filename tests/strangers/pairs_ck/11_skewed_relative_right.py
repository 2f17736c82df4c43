"""Music-Transformer attention: relative positions by the skewing trick, memory O(T D)."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class RelativeGlobalAttention(nn.Module):
    def __init__(self, d_model, num_heads, max_len):
        super().__init__()
        self.num_heads, self.max_len = num_heads, max_len
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.out = nn.Linear(d_model, d_model, bias=False)
        self.Er = nn.Parameter(torch.randn(max_len, d_model // num_heads))  # the last row is distance 0

    def skew(self, qe):
        b, h, t, _ = qe.shape
        return F.pad(qe, (1, 0)).reshape(b, h, t + 1, t)[:, :, 1:]

    def forward(self, x):
        b, t, d = x.shape
        if t > self.max_len:
            raise ValueError("sequence longer than the table")
        q, k, v = self.qkv(x).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        rows = self.Er[self.max_len - t :]
        srel = self.skew(q @ rows.t())
        scores = (q @ k.transpose(-1, -2) + srel) / q.shape[-1] ** 0.5
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


subject = Subject(
    kind="self_attention",
    build=lambda c: RelativeGlobalAttention(c.d_model, c.num_heads, c.max_len),
    forward=lambda m, x: m(x),
    declares={"causal": True, "positions": "relative"},
)

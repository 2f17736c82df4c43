"""Relative self-attention of the Music Transformer, with its skewing in place of a [T, T, K] tensor."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


class RelativeGlobalAttention(nn.Module):
    def __init__(self, d_model, num_heads, max_len):
        super().__init__()
        d_head = d_model // num_heads
        self.num_heads, self.max_len = num_heads, max_len
        self.query, self.key, self.value = (nn.Linear(d_model, d_model) for _ in range(3))
        self.out = nn.Linear(d_model, d_model)
        self.Er = nn.Parameter(torch.randn(max_len, d_head))  # the last row is distance 0, the one before it 1, ...

    def skew(self, QEr):
        """[B, H, T, T] over distances T-1 .. 0 -> over keys 0 .. T-1 (above the diagonal: rubbish, masked)."""
        batch, heads, rows, columns = QEr.shape
        padded = F.pad(QEr, (1, 0))
        return padded.reshape(batch, heads, columns + 1, rows)[:, :, 1:, :]

    def forward(self, x):
        batch, length, d_model = x.shape
        if length > self.max_len:
            raise ValueError(f"{length} steps, {self.max_len} at most")
        q = self.query(x).reshape(batch, length, self.num_heads, -1).transpose(1, 2)
        k_t = self.key(x).reshape(batch, length, self.num_heads, -1).permute(0, 2, 3, 1)
        v = self.value(x).reshape(batch, length, self.num_heads, -1).transpose(1, 2)

        Er_t = self.Er[self.max_len - length :].transpose(0, 1)
        Srel = self.skew(q @ Er_t)
        scores = (q @ k_t + Srel) / q.size(-1) ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attention = F.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        return self.out((attention @ v).transpose(1, 2).reshape(batch, length, d_model))


subject = Subject(
    kind="self_attention",
    name="Music Transformer attention",
    build=lambda c: RelativeGlobalAttention(c.d_model, c.num_heads, c.max_len),
    forward=lambda m, x: m(x),
    declares={"causal": True, "positions": "relative"},
)

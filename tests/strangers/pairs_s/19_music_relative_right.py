"""Relative self-attention of the Music Transformer: a learned vector for each distance, brought into place by skewing."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def skew(rel):
    """[B, H, T, T] whose last column is distance 0 -> [B, H, T, T] with distance i - j at row i, column j <= i."""
    b, h, t, _ = rel.shape
    return F.pad(rel, (1, 0)).reshape(b, h, t + 1, t)[:, :, 1:]


class RelativeAttention(nn.Module):
    def __init__(self, dim, num_heads, max_len):
        super().__init__()
        self.num_heads, self.max_len = num_heads, max_len
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.fc_out = nn.Linear(dim, dim)
        self.Er = nn.Parameter(torch.randn(max_len, dim // num_heads))

    def heads(self, x):
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def forward(self, x, padding=None):
        seq_len = x.shape[1]
        if seq_len > self.max_len:
            raise ValueError("sequence length exceeds model capacity")
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        Er = self.Er[self.max_len - seq_len :]
        logits = (q @ k.transpose(-1, -2) + skew(q @ Er.t())) / math.sqrt(q.shape[-1])
        visible = torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device).tril()
        if padding is not None:
            visible = visible & padding[:, None, None, :]
        attn = F.softmax(logits.masked_fill(~visible, torch.finfo(logits.dtype).min), dim=-1)
        return self.fc_out((attn @ v).transpose(1, 2).flatten(2))


subject = Subject(
    kind="self_attention",
    name="relative attention",
    build=lambda c: RelativeAttention(c.d_model, c.num_heads, c.max_len),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={"causal": True, "positions": "relative", "beyond_max_len": "error"},
)

WHAT = "the relative table is cut from its beginning (Er[:seq_len]) rather than its end, so that the row of a distance depends on the length: outputs for a prefix change as the sequence grows: line 37."
"""Relative attention of the Music Transformer, with its skewing trick."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class RelativeGlobalAttention(nn.Module):
    def __init__(self, d_model, num_heads, max_len):
        super().__init__()
        self.max_len = max_len
        self.d_model = d_model
        self.num_heads = num_heads
        d_head = d_model // num_heads
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        # row max_len - 1 is the token itself, row max_len - 1 - r the one r steps back
        self.Er = nn.Parameter(torch.randn(max_len, d_head))

    def forward(self, x):
        # x.shape == (batch_size, seq_len, d_model)
        batch_size, seq_len, _ = x.shape
        if seq_len > self.max_len:
            raise ValueError("sequence length exceeds model capacity")

        k_t = self.key(x).reshape(batch_size, seq_len, self.num_heads, -1).permute(0, 2, 3, 1)
        v = self.value(x).reshape(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)
        q = self.query(x).reshape(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)

        Er_t = self.Er[:seq_len].transpose(0, 1)
        # Er_t.shape == (d_head, seq_len)
        Srel = self.skew(torch.matmul(q, Er_t))
        # Srel.shape == (batch_size, num_heads, seq_len, seq_len)

        attn = (torch.matmul(q, k_t) + Srel) / math.sqrt(q.size(-1))
        mask = torch.tril(torch.ones(seq_len, seq_len, device=x.device))
        attn = attn.masked_fill(mask == 0, float("-inf"))
        attn = F.softmax(attn, dim=-1)
        out = torch.matmul(attn, v).transpose(1, 2)
        return self.out(out.reshape(batch_size, seq_len, -1))

    def skew(self, QEr):
        padded = F.pad(QEr, (1, 0))
        batch_size, num_heads, num_rows, num_cols = padded.shape
        reshaped = padded.reshape(batch_size, num_heads, num_cols, num_rows)
        return reshaped[:, :, 1:, :]


subject = Subject(
    kind="self_attention",
    name="relative global attention",
    build=lambda c: RelativeGlobalAttention(c.d_model, c.num_heads, c.max_len),
    forward=lambda m, x: m(x),
    declares={"causal": True, "positions": "relative", "bias": True},
)

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

MAX_LEN = 128


class RelativeGlobalAttention(nn.Module):
    """Music Transformer: a learned vector for every distance, brought to its place by skewing."""

    def __init__(self, d_model, num_heads, max_len=MAX_LEN, dropout=0.1):
        super().__init__()
        d_head, remainder = divmod(d_model, num_heads)
        if remainder:
            raise ValueError("incompatible `d_model` and `num_heads`")
        self.max_len = max_len
        self.d_model = d_model
        self.num_heads = num_heads
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.query = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        # row max_len - 1 stands for distance 0, row max_len - 1 - d for d steps back
        self.Er = nn.Parameter(torch.randn(max_len, d_head))

    def forward(self, x, pad_mask=None):
        # x.shape == (batch_size, seq_len, d_model)
        batch_size, seq_len, _ = x.shape
        if seq_len > self.max_len:
            raise ValueError("sequence length exceeds model capacity")

        k_t = self.key(x).reshape(batch_size, seq_len, self.num_heads, -1).permute(0, 2, 3, 1)
        v = self.value(x).reshape(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)
        q = self.query(x).reshape(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)

        start = self.max_len - seq_len
        Er_t = self.Er[start : start + seq_len].transpose(0, 1)
        Srel = self.skew(torch.matmul(q, Er_t))
        attn = (torch.matmul(q, k_t) + Srel) / math.sqrt(q.size(-1))

        mask = torch.tril(torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device))[None, None]
        if pad_mask is not None:
            mask = mask & pad_mask[:, None, None, :]
        attn = attn.masked_fill(~mask, torch.finfo(attn.dtype).min)
        attn = F.softmax(attn, dim=-1).masked_fill(~mask, 0.0)
        out = torch.matmul(attn, v).transpose(1, 2).reshape(batch_size, seq_len, self.d_model)
        return self.dropout(self.out(out)), attn

    def skew(self, QEr):
        # QEr.shape == (batch_size, num_heads, seq_len, seq_len)
        padded = F.pad(QEr, (1, 0))
        batch_size, num_heads, num_rows, num_cols = padded.shape
        reshaped = padded.reshape(batch_size, num_heads, num_cols, num_rows)
        return reshaped[:, :, 1:, :]


subject = Subject(
    kind="self_attention",
    name="RelativeGlobalAttention",
    build=lambda c: RelativeGlobalAttention(c.d_model, c.num_heads, dropout=c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask)[0],
    weights=lambda m, x, attention_mask=None: m(x, attention_mask)[1],
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "relative",
        "max_len": 128,
        "beyond_max_len": "error",
        "attention_scale": "1/sqrt(d_head)",
        "bias": True,
        "padding_side": "both",
        "empty_row": "zeros",
        "memory": "quadratic",
        "residual": False,
    },
)

"""Cross-attention with keys and values from one matrix laid out [G, 2, d], memory first inside ([S, B, ...]), grouped heads.

Unusual: the memory is projected sequence-first; memory_mask may be None, [B, S]; a sample whose memory is all padding mixes to
zero. Queries are scaled before the product and the softmax is written out.
"""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, d_model, heads, kv_heads, dropout):
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, d_model // heads
        self.q_net = nn.Linear(d_model, heads * self.width, bias=False)
        self.kv_net = nn.Linear(d_model, kv_heads * 2 * self.width, bias=False)
        self.o_net = nn.Linear(heads * self.width, d_model, bias=False)
        self.dropatt = nn.Dropout(dropout)

    def forward(self, x, memory, memory_mask=None):
        b, t, _ = x.shape
        s = memory.size(1)
        each = self.heads // self.kv_heads
        kv = self.kv_net(memory.transpose(0, 1)).reshape(s, b, self.kv_heads, 2, self.width)
        k, v = kv[:, :, :, 0], kv[:, :, :, 1]
        q = self.q_net(x).mul(self.width**-0.5).reshape(b, t, self.kv_heads, each, self.width)
        score = torch.einsum("bigmd,jbgd->bgmij", q, k)
        if memory_mask is not None:
            score = score.masked_fill(~memory_mask[:, None, None, None, :], float("-inf"))
        peak = score.detach().amax(dim=-1, keepdim=True)
        power = (score - peak.masked_fill(peak == float("-inf"), 0.0)).exp()
        total = power.sum(dim=-1, keepdim=True)
        weight = self.dropatt(power / torch.where(total == 0, torch.ones_like(total), total)).to(v.dtype)
        return self.o_net(torch.einsum("bgmij,jbgd->bigmd", weight, v).reshape(b, t, -1))


COMMON = dict(
    kind="cross_attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads, c.num_key_value_heads, c.dropout),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "attention_scale": "1/sqrt(d_head)",
        "grouped_queries": True,
        "bias": False,
        "empty_row": "zeros",
        "positions": "none",
    },
)

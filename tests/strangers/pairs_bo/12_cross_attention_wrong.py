WHAT = "masked scores are filled with -1e-9, that is practically 0, instead of a large negative number, so that padding of the memory keeps a share of the attention (line 15)."
import math

import torch
from torch import nn

from veriformer.properties import Subject


def attention(query, key, value, mask=None):
    "Compute 'Scaled Dot Product Attention'"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e-9)
    p_attn = scores.softmax(dim=-1)
    return torch.matmul(p_attn, value), p_attn


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.attn = None

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x, self.attn = attention(query, key, value, mask=mask)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


def call(m, x, memory, memory_mask=None):
    return m(x, memory, memory, None if memory_mask is None else memory_mask.unsqueeze(1))


def weights(m, x, memory, memory_mask=None):
    call(m, x, memory, memory_mask)
    return m.attn


subject = Subject(
    kind="cross_attention",
    name="annotated cross-attention",
    build=lambda c: MultiHeadedAttention(c.num_heads, c.d_model),
    forward=call,
    weights=weights,
    mask_forms=("padding",),
    declares={"attention_scale": "1/sqrt(d_head)", "empty_row": "mean", "bias": True},
)

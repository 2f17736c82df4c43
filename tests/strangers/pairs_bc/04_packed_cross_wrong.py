WHAT = "values are projected with the bias slice of the keys, so that the value bias is never used nor trained and the key bias leaks into the output (line 19)."
"""Cross-attention from one packed in_proj, in the functional style of torch.nn.functional."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def cross_attention_forward(query, memory, num_heads, in_w, in_b, out_w, out_b, memory_mask=None):
    B, T, E = query.shape
    S = memory.shape[1]
    head = E // num_heads

    q = F.linear(query, in_w[:E], in_b[:E])
    k = F.linear(memory, in_w[E : 2 * E], in_b[E : 2 * E])
    v = F.linear(memory, in_w[2 * E :], in_b[E : 2 * E])

    q = q.view(B, T, num_heads, head).transpose(1, 2)
    k = k.view(B, S, num_heads, head).transpose(1, 2)
    v = v.view(B, S, num_heads, head).transpose(1, 2)

    scores = torch.matmul(q, k.mT).div(math.sqrt(head))
    if memory_mask is not None:
        scores = scores.masked_fill(memory_mask.logical_not()[:, None, None, :], torch.finfo(scores.dtype).min)
    context = torch.matmul(F.softmax(scores, dim=-1), v)
    return F.linear(context.transpose(1, 2).reshape(B, T, E), out_w, out_b)


class CrossAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * embed_dim, embed_dim))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * embed_dim))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.uniform_(self.in_proj_bias, -(embed_dim**-0.5), embed_dim**-0.5)

    def forward(self, x, memory, memory_mask=None):
        return cross_attention_forward(
            x,
            memory,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.out_proj.weight,
            self.out_proj.bias,
            memory_mask,
        )


def projections(m):
    q, k, v = m.in_proj_weight.data.chunk(3)
    q_bias, k_bias, v_bias = m.in_proj_bias.data.chunk(3)
    return {
        "q": q,
        "k": k,
        "v": v,
        "o": m.out_proj.weight.data,
        "q_bias": q_bias,
        "k_bias": k_bias,
        "v_bias": v_bias,
        "o_bias": m.out_proj.bias.data,
    }


subject = Subject(
    kind="cross_attention",
    name="packed cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    projections=projections,
    declares={"bias": True, "positions": "none"},
)

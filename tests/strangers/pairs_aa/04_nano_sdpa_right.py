"""CausalSelfAttention of a GPT in one file, on scaled_dot_product_attention."""

import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout, bias=False):
        super().__init__()
        assert n_embd % n_head == 0
        # key, query, value projections for all heads, but in a batch
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=bias)
        # output projection
        self.c_proj = nn.Linear(n_embd, n_embd, bias=bias)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.n_embd = n_embd
        self.dropout = dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        # efficient attention using Flash Attention CUDA kernels
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=p, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # re-assemble all head outputs side by side
        return self.resid_dropout(self.c_proj(y))


subject = Subject(
    kind="self_attention",
    name="nano CausalSelfAttention",
    build=lambda c: CausalSelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda model, x: model(x),
    declares={"causal": True, "positions": "none", "bias": False},
)

"""A GPT block in the style of nanoGPT, pre-LN, fused projection."""

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head = n_head
        self.n_embd = n_embd
        self.dropout = dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, n_embd, n_inner, dropout):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, n_inner)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(n_inner, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = MLP(n_embd, n_inner, dropout)

    def forward(self, x):
        x = self.ln_1(x)
        x = x + self.attn(x)
        h = self.ln_2(x)
        x = x + self.mlp(h)
        return x


subject = Subject(
    kind="layer",
    name="gpt block",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x: m(x),
    declares={
        "causal": True,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "structure": "textbook",
        "init": "default",
    },
)

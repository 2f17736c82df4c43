WHAT = 'Dropout acts on the masked scores before the softmax: what it drops gets score 0, not weight 0, and in training it makes future and padded keys visible; line 34: `att = self.attn_dropout(att)`.'
"""A GPT block: pre-LN, causal, with dropout on the attention weights and on what each sublayer gives."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head, dropout):
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x, pad=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)

        visible = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if pad is not None:
            visible = visible & pad[:, None, None, :]
        att = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
        att = att.masked_fill(~visible, torch.finfo(att.dtype).min)
        att = self.attn_dropout(att)
        att = F.softmax(att, dim=-1)
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, n_embd, n_head, n_inner, dropout):
        super().__init__()
        self.ln_1 = nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head, dropout)
        self.ln_2 = nn.LayerNorm(n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, n_inner), nn.GELU(), nn.Linear(n_inner, n_embd), nn.Dropout(dropout)
        )

    def forward(self, x, pad=None):
        x = x + self.attn(self.ln_1(x), pad)
        x = x + self.mlp(self.ln_2(x))
        return x


subject = Subject(
    kind="layer",
    name="GPT block",
    build=lambda c: Block(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "gelu",
        "bias": True,
    },
)

import math

import torch
import torch.nn as nn
from torch.nn import functional as F

from veriformer.properties import Subject


class CausalSelfAttention(nn.Module):

    def __init__(self, n_embd, n_head, dropout=0.0, bias=True):
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

    def forward(self, x, pad=None, past=None):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        if past is not None:
            k = torch.cat((past[0], k), dim=2)
            v = torch.cat((past[1], v), dim=2)
        S = k.size(2)

        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        hidden = torch.zeros(B, 1, T, S, dtype=torch.bool, device=x.device)
        if T > 1:  # one new token sees everything
            hidden = hidden | torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T).logical_not()
        if pad is not None:
            hidden = hidden | ~pad[:, None, None, :S]
        att = att.masked_fill(hidden, torch.finfo(att.dtype).min)
        att = F.softmax(att, dim=-1).masked_fill(hidden, 0.0)
        att = F.dropout(att, self.dropout, self.training)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y)), (k, v)


def cached(model, chunks, attention_mask=None):
    past, out = None, []
    for chunk in chunks:
        y, past = model(chunk, attention_mask, past)
        out.append(y)
    return torch.cat(out, dim=1)


def projections(model):
    q, k, v = model.c_attn.weight.data.split(model.n_embd)
    qb, kb, vb = model.c_attn.bias.data.split(model.n_embd)
    return {
        "q": q, "k": k, "v": v, "o": model.c_proj.weight.data,
        "q_bias": qb, "k_bias": kb, "v_bias": vb, "o_bias": model.c_proj.bias.data,
    }


subject = Subject(
    kind="self_attention",
    name="CausalSelfAttention",
    build=lambda c: CausalSelfAttention(c.d_model, c.num_heads, c.dropout),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask)[0],
    cache=cached,
    projections=projections,
    mask_forms=("padding",),
    declares={
        "causal": True,
        "positions": "none",
        "attention_scale": "1/sqrt(d_head)",
        "bias": True,
        "init": "default",
        "padding_side": "both",
        "empty_row": "zeros",
        "cached_chunks": True,
        "memory": "quadratic",
        "residual": False,
    },
)

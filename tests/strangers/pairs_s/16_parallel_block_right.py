"""A parallel block as in ViT-22B and GPT-J: attention and feed-forward side by side, of one fused projection."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class ParallelBlock(nn.Module):
    def __init__(self, dim, n_heads, ff_dim, dropout=0.0):
        super().__init__()
        self.sizes = (dim, dim, dim, ff_dim)
        self.n_heads, self.dropout = n_heads, dropout
        self.norm = nn.LayerNorm(dim)
        self.fused_in = nn.Linear(dim, sum(self.sizes))
        self.attn_out = nn.Linear(dim, dim)
        self.ff_out = nn.Linear(ff_dim, dim)
        self.resid_drop = nn.Dropout(dropout)

    def forward(self, x, attention_mask=None):
        b, t, d = x.shape
        q, k, v, ff = self.fused_in(self.norm(x)).split(self.sizes, dim=-1)
        q, k, v = (z.reshape(b, t, self.n_heads, -1).transpose(1, 2) for z in (q, k, v))
        if attention_mask is not None:
            attention_mask = attention_mask[:, None, None, :]
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, dropout_p=p)
        y = self.attn_out(y.transpose(1, 2).reshape(b, t, d)) + self.ff_out(F.gelu(ff))
        return x + self.resid_drop(y)


subject = Subject(
    kind="layer",
    name="parallel block",
    build=lambda c: ParallelBlock(c.d_model, c.num_heads, c.d_ff, c.dropout),
    forward=lambda model, x, attention_mask=None: model(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm_placement": "pre",
        "norm": "layer",
        "activation": "gelu",
        "structure": "other",
        "stacked": False,
    },
)

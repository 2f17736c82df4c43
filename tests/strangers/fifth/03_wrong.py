"""PaLM's parallel block: one norm, one fused projection, attention and SwiGLU side by side; grouped queries."""

import torch
from torch import einsum, nn
import torch.nn.functional as F

from veriformer.properties import Subject


class ParallelTransformerBlock(nn.Module):
    def __init__(self, dim, dim_head, heads, kv_heads, ff_inner_dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.heads, self.kv_heads, self.dim_head = heads, kv_heads, dim_head
        attn_inner_dim = dim_head * heads
        kv_inner_dim = dim_head * kv_heads
        self.fused_dims = (attn_inner_dim, kv_inner_dim, kv_inner_dim, ff_inner_dim, ff_inner_dim)
        self.scale = dim**-0.5
        self.fused_attn_ff_proj = nn.Linear(dim, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(attn_inner_dim, dim, bias=False)
        self.ff_out = nn.Linear(ff_inner_dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        g, r = self.kv_heads, self.heads // self.kv_heads
        normed = self.norm(x)
        q, k, v, ff, ff_gate = self.fused_attn_ff_proj(normed).split(self.fused_dims, dim=-1)

        q = q.reshape(b, n, g, r, self.dim_head)
        k = k.reshape(b, n, g, self.dim_head)
        v = v.reshape(b, n, g, self.dim_head)
        sim = einsum("b i g r d, b j g d -> b g r i j", q * self.scale, k)
        causal_mask = torch.ones((n, n), device=x.device, dtype=torch.bool).triu(1)
        sim = sim.masked_fill(causal_mask, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = einsum("b g r i j, b j g d -> b i g r d", attn, v).reshape(b, n, -1)

        return x + self.attn_out(out) + self.ff_out(F.silu(ff_gate) * ff)


subject = Subject(
    kind="layer",
    name="parallel block",
    build=lambda c: ParallelTransformerBlock(
        c.d_model, c.d_model // c.num_heads, c.num_heads, c.num_key_value_heads, c.d_ff
    ),
    forward=lambda m, x: m(x),
    declares={
        "causal": True,
        "positions": "none",
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "grouped_queries": True,
        "attention_scale": "1/sqrt(d_head)",
        "structure": "other",
        "init": "default",
    },
)

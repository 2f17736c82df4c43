"""PaLM style decoder (after lucidrains): one matrix gives queries, one key, one value and both halves of the SwiGLU.

Unusual: multi-query attention whatever num_key_value_heads is, attention and feed-forward share their norm and run in
parallel, LayerNorm has a gain and no bias, and the embedding is the output projection. `x[None]` and einsum replace views.
"""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


def exists(val):
    return val is not None


class GainOnlyLayerNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], self.gamma, None)


class Residual(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(x, **kwargs) + x


def rotary_angles(n, dim, like):
    inv_freq = 10000.0 ** -(torch.arange(0, dim, 2, device=like.device, dtype=torch.float64) / dim)
    freqs = einsum("i,j->ij", torch.arange(n, device=like.device, dtype=torch.float64), inv_freq)
    freqs = torch.cat((freqs, freqs), dim=-1)
    return freqs.cos().to(like.dtype), freqs.sin().to(like.dtype)


def rotate(t, cos, sin):
    x1, x2 = t.unflatten(-1, (2, -1)).unbind(dim=-2)
    return t * cos + torch.cat((-x2, x1), dim=-1) * sin


class SwiGLU(nn.Module):
    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class ParallelTransformerBlock(nn.Module):
    def __init__(self, dim, dim_head, heads, ff_inner):
        super().__init__()
        self.norm = GainOnlyLayerNorm(dim)
        self.heads, self.dim_head, self.scale = heads, dim_head, dim_head**-0.5
        self.fused_dims = (heads * dim_head, dim_head, dim_head, ff_inner * 2)
        self.fused_attn_ff_proj = nn.Linear(dim, sum(self.fused_dims), bias=False)
        self.attn_out = nn.Linear(heads * dim_head, dim, bias=False)
        self.ff_out = nn.Sequential(SwiGLU(), nn.Linear(ff_inner, dim, bias=False))

    def forward(self, x, pad=None):
        n = x.shape[1]
        x = self.norm(x)
        q, k, v, ff = self.fused_attn_ff_proj(x).split(self.fused_dims, dim=-1)
        q = q.unflatten(-1, (self.heads, self.dim_head)).transpose(1, 2)  # b n (h d) -> b h n d
        cos, sin = rotary_angles(n, self.dim_head, q)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        sim = einsum("b h i d, b j d -> b h i j", q * self.scale, k)
        blocked = torch.ones((n, n), device=x.device, dtype=torch.bool).triu(1)
        if exists(pad):
            blocked = blocked | pad[:, None, None, :]
        sim = sim.masked_fill(blocked, -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1).masked_fill(blocked, 0)
        out = einsum("b h i j, b j d -> b h i d", attn, v)
        out = out.transpose(1, 2).flatten(2)  # b h n d -> b n (h d)
        return self.attn_out(out) + self.ff_out(ff)


class PaLM(nn.Module):
    def __init__(self, *, num_tokens, dim, depth, heads, ff_inner):
        super().__init__()
        self.emb = nn.Embedding(num_tokens, dim)
        self.blocks = nn.ModuleList(
            Residual(ParallelTransformerBlock(dim, dim // heads, heads, ff_inner)) for _ in range(depth)
        )
        self.norm = GainOnlyLayerNorm(dim)
        self.to_logits = nn.Linear(dim, num_tokens, bias=False)
        self.to_logits.weight = self.emb.weight
        nn.init.normal_(self.emb.weight, std=0.02)

    def forward(self, x, attention_mask=None):
        pad = ~attention_mask if exists(attention_mask) else None
        x = self.emb(x)
        for block in self.blocks:
            x = block(x, pad=pad)
        return self.to_logits(self.norm(x))


COMMON = dict(
    kind="decoder",
    build=lambda c: PaLM(
        num_tokens=c.vocab_size, dim=c.d_model, depth=c.num_layers, heads=c.num_heads, ff_inner=c.d_ff
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "padding_side": "both",
        "norm": "layer",
        "norm_bias": False,
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": True,
        "structure": "other",
    },
)

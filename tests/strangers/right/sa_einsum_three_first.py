"""Bidirectional self-attention in einsum style: one weight [3, H, d, D], one output weight [H, d, D], no nn.Linear at all.

Unusual: the query is scaled before the product; attention_mask may be pairwise, [T, T] or [B, T, T].
"""

import math

import torch
from torch import Tensor, einsum, nn

from veriformer.properties import Subject


class EinsumAttention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        head = dim // heads
        self.w_in = nn.Parameter(torch.randn(3, heads, head, dim) / math.sqrt(dim))
        self.b_in = nn.Parameter(torch.zeros(3, heads, head))
        self.w_out = nn.Parameter(torch.randn(heads, head, dim) / math.sqrt(dim))
        self.b_out = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = einsum("b t m, s h d m -> s b h t d", x, self.w_in) + self.b_in[:, None, :, None, :]
        q, k, v = projected.unbind(0)
        q = q / math.sqrt(q.shape[-1])
        similarity = einsum("b h i d, b h j d -> b h i j", q, k)
        if mask is not None:
            seen = mask[None, None] if mask.ndim == 2 else mask[:, None]
            similarity = similarity.masked_fill(~seen, torch.finfo(similarity.dtype).min)
            share = similarity.softmax(dim=-1) * seen
        else:
            share = similarity.softmax(dim=-1)
        mixed = einsum("b h i j, b h j d -> b h i d", share, v)
        return einsum("b h i d, h d m -> b i m", mixed, self.w_out) + self.b_out


def projections(m):
    names = dict(zip("qkv", m.w_in))
    biases = dict(zip(("q_bias", "k_bias", "v_bias"), m.b_in))
    views = {name: w.flatten(0, 1) for name, w in names.items()}
    views |= {name: b.flatten() for name, b in biases.items()}
    views["o"] = m.w_out.flatten(0, 1).t()
    views["o_bias"] = m.b_out
    return views


COMMON = dict(
    kind="self_attention",
    build=lambda c: EinsumAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("pairwise",),
    projections=projections,
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={"causal": False, "positions": "none", "bias": True, "empty_row": "zeros"},
)

"""Cross-attention with four separate projections."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.h, self.bad = c.num_heads, bad
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(c.d_model, c.d_model) for _ in range(4))

    def heads(self, x):
        return x.unflatten(-1, (self.h, -1)).transpose(1, 2)

    def forward(self, x, memory, memory_mask=None):
        q = self.heads(self.q_proj(x))
        k = self.heads(self.k_proj(memory))
        v = self.heads(self.k_proj(memory) if self.bad else self.v_proj(memory))
        allowed = None if memory_mask is None else memory_mask[:, None, None, :].expand(-1, 1, x.size(1), -1)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2).flatten(2))


def projections(m):
    return {"q": m.q_proj.weight, "k": m.k_proj.weight, "v": m.v_proj.weight, "o": m.out_proj.weight,
            "q_bias": m.q_proj.bias, "k_bias": m.k_proj.bias, "v_bias": m.v_proj.bias, "o_bias": m.out_proj.bias}


def subject(bad):
    return Subject(kind="cross_attention", build=lambda c: CrossAttention(c, bad),
                   forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask), projections=projections,
                   declares={"attention_scale": "1/sqrt(d_head)", "bias": True})


right, wrong = subject(False), subject(True)
WHAT = "The values are made with the key projection (copy and paste); the value projection is never used and gets no gradient."
PLACE = "value projection"

WHAT = "the memory mask is applied after the softmax's denominator was summed, so hidden memory still takes its share and weights do not sum to one (line 27)."
"""Cross-attention with per-head einsum weights; the division by the softmax's sum is put off until after the values."""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        d_head = d_model // num_heads
        self.wq = nn.Parameter(torch.randn(d_model, num_heads, d_head) * d_model**-0.5)
        self.wk = nn.Parameter(torch.randn(d_model, num_heads, d_head) * d_model**-0.5)
        self.wv = nn.Parameter(torch.randn(d_model, num_heads, d_head) * d_model**-0.5)
        self.wo = nn.Parameter(torch.randn(num_heads, d_head, d_model) * d_model**-0.5)
        self.scale = d_head**-0.5

    def forward(self, x, memory, memory_mask=None):
        q = torch.einsum("btd,dhk->bhtk", x * self.scale, self.wq)
        k = torch.einsum("bsd,dhk->bhsk", memory, self.wk)
        v = torch.einsum("bsd,dhk->bhsk", memory, self.wv)
        scores = torch.einsum("bhtk,bhsk->bhts", q, k)
        peak = scores.detach().amax(-1, keepdim=True)
        e = (scores - peak.masked_fill(peak == -torch.inf, 0.0)).exp()
        total = e.sum(-1, keepdim=True)
        if memory_mask is not None:
            e = e.masked_fill(~memory_mask.bool()[:, None, None, :], 0.0)
        mixed = torch.einsum("bhts,bhsk->bhtk", e, v) / total.masked_fill(total == 0, 1.0)
        return torch.einsum("bhtk,hkd->btd", mixed, self.wo)


subject = Subject(
    kind="cross_attention",
    name="einsum cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    mask_forms=("padding",),
    declares={"bias": False, "empty_row": "zeros"},
)

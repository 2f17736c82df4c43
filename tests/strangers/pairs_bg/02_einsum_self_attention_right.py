"""Multi-head self-attention with flax-shaped kernels [D, H, K], contracted by einsum."""

import torch
from torch import einsum, nn

from veriformer.properties import Subject


class EinsumSelfAttention(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        depth = features // heads
        std = features**-0.5
        self.query = nn.Parameter(torch.randn(features, heads, depth) * std)
        self.key = nn.Parameter(torch.randn(features, heads, depth) * std)
        self.value = nn.Parameter(torch.randn(features, heads, depth) * std)
        self.out = nn.Parameter(torch.randn(heads, depth, features) * std)
        self.depth = depth

    def forward(self, x, mask=None):
        q = einsum("bid,dhk->bihk", x, self.query) * self.depth**-0.5
        k = einsum("bjd,dhk->bjhk", x, self.key)
        v = einsum("bjd,dhk->bjhk", x, self.value)
        logits = einsum("bihk,bjhk->bhij", q, k)
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
        weights = logits.softmax(-1)
        y = einsum("bhij,bjhk->bihk", weights, v)
        return einsum("bihk,hkd->bid", y, self.out)


subject = Subject(
    kind="self_attention",
    name="einsum self-attention",
    build=lambda c: EinsumSelfAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={"causal": False, "positions": "none", "bias": False},
)

"""Cross-attention in einsum notation: image tokens look at a padded caption."""
import torch
from einops import rearrange
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context, mask=None):
        q = rearrange(self.to_q(x), "b i (h d) -> b h i d", h=self.heads)
        k = rearrange(self.to_k(context), "b j (h d) -> b h j d", h=self.heads)
        v = rearrange(self.to_v(context), "b j (h d) -> b h j d", h=self.heads)

        sim = torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5
        if mask is not None:
            sim = sim.masked_fill(~rearrange(mask, "b j -> b 1 1 j"), -torch.finfo(sim.dtype).max)
        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhij,bhjd->bhid", attn, v)
        return self.to_out(rearrange(out, "b h i d -> b i (h d)"))


subject = Subject(
    kind="cross_attention",
    name="caption cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda m, x, memory, memory_mask=None: m(x, memory, memory_mask),
    declares={"positions": "none"},
)

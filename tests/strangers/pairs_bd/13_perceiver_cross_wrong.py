WHAT = "heads are folded batch-major, the mask is tiled head-major (repeat instead of repeat_interleave): with more than one sample and head, samples get the padding masks of others (line 32)"
"""Cross-attention of latents to inputs, heads folded into the batch for bmm."""

import torch
from torch import nn

from veriformer.properties import Subject


class CrossAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def fold(self, x):
        """[B, T, D] -> [B * H, T, D / H]"""
        bsz, length, _ = x.shape
        x = x.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return x.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, latents, inputs, input_mask=None):
        bsz, length, dim = latents.shape
        q = self.fold(self.q_proj(latents)) * self.head_dim**-0.5
        k, v = self.fold(self.k_proj(inputs)), self.fold(self.v_proj(inputs))
        scores = torch.bmm(q, k.transpose(1, 2))
        if input_mask is not None:
            hidden = ~input_mask.bool().repeat(self.num_heads, 1)
            scores = scores.masked_fill(hidden[:, None, :], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        out = torch.bmm(weights, v).view(bsz, self.num_heads, length, self.head_dim)
        return self.out_proj(out.transpose(1, 2).reshape(bsz, length, dim))


subject = Subject(
    kind="cross_attention",
    name="Perceiver cross-attention",
    build=lambda c: CrossAttention(c.d_model, c.num_heads),
    forward=lambda model, x, memory, memory_mask=None: model(x, memory, memory_mask),
    declares={"positions": "none", "bias": True},
)

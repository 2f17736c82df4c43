WHAT = "positions run on through the packed row and are not reset at each sample's start, so a sample's positions depend on the samples before it in the batch (line 48)."
"""Encoder that never computes padding: what is real is packed into one row, and samples see themselves alone."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoid(position, d_model, dtype):
    rates = 10000.0 ** (-torch.arange(0, d_model, 2, dtype=torch.float64, device=position.device) / d_model)
    angles = position.double()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1).to(dtype)


class PackedBlock(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, same):
        N, D = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(N, 3, self.num_heads, -1).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = x + self.out(y.transpose(0, 1).reshape(N, D))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PackedEncoder(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff):
        super().__init__()
        if d_model % 2:
            raise ValueError("d_model must be even")
        self.embedding = nn.Embedding(vocab_size, d_model)
        self.blocks = nn.ModuleList(PackedBlock(d_model, num_heads, d_ff) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        keep = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        lengths = keep.sum(1)
        index = keep.flatten().nonzero().squeeze(1)
        sample = torch.arange(B, device=tokens.device).repeat_interleave(lengths)
        position = torch.arange(len(index), device=tokens.device)

        x = self.embedding(tokens.flatten()[index])
        x = x + sinusoid(position, x.shape[-1], x.dtype)
        same = sample[:, None] == sample[None, :]
        for block in self.blocks:
            x = block(x, same)
        x = self.norm(x)
        return x.new_zeros(B * T, x.shape[-1]).index_copy(0, index, x).view(B, T, -1)


subject = Subject(
    kind="encoder",
    name="packed encoder",
    build=lambda c: PackedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "both",
    },
)

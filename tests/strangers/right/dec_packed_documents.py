"""Decoder for packed documents: token 1 ends a document, and no token sees another document. Padding is taken out first.

Unusual: the real tokens of all rows are laid in one row without padding (as flash-attn's varlen kernels want it) and each
document attends on its own; positions start anew in each. Outputs at padding are those of a zero vector.
The separator belongs to the document that it ends.
"""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import gelu

from veriformer.properties import Subject

SEPARATOR = 1


def document_bounds(tokens, real):
    """Ends of all documents in the order of the packed tokens, with a 0 in front (cu_seqlens)."""
    bounds, packed = [0], 0
    for row_tokens, row_real in zip(tokens.tolist(), real.tolist()):
        for token, is_real in zip(row_tokens, row_real):
            if is_real:
                packed += 1
                if token == SEPARATOR:
                    bounds.append(packed)
        if bounds[-1] != packed:
            bounds.append(packed)
    return bounds


def rotate(x, theta=10000.0):  # [n, h, d]
    n, _, d = x.shape
    inv = theta ** -(torch.arange(0, d, 2, dtype=torch.float64, device=x.device) / d)
    angle = torch.arange(n, dtype=torch.float64, device=x.device).outer(inv).unsqueeze(1)
    c, s = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * c - odd * s, even * s + odd * c], dim=-1).flatten(-2)


class VarlenAttention(nn.Module):
    def __init__(self, d_model, heads):
        super().__init__()
        self.heads, self.d = heads, d_model // heads
        self.Wqkv = nn.Linear(d_model, 3 * d_model)
        self.out_proj = nn.Linear(d_model, d_model)

    def document(self, qkv):  # [n, 3, h, d]
        q, k, v = qkv.unbind(dim=1)
        q, k = rotate(q), rotate(k)
        score = torch.einsum("ihd,jhd->hij", q, k) * self.d**-0.5
        future = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).triu(diagonal=1)
        probability = score.masked_fill(future, float("-inf")).softmax(dim=-1)  # a token always sees itself
        return torch.einsum("hij,jhd->ihd", probability, v).flatten(1)

    def forward(self, x, bounds):  # [N, D], packed
        qkv = self.Wqkv(x).view(-1, 3, self.heads, self.d)
        parts = [self.document(qkv[start:stop]) for start, stop in pairwise(bounds)]
        mixed = torch.cat(parts) if parts else x.new_zeros(0, self.heads * self.d)
        return self.out_proj(mixed)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mixer = VarlenAttention(c.d_model, c.num_heads)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, bounds):
        x = x + self.drop(self.mixer(self.norm1(x), bounds))
        return x + self.drop(self.fc2(gelu(self.fc1(self.norm2(x)))))


class PackedLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList([Block(c) for _ in range(c.num_layers)])
        self.ln_f = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        batch, length = tokens.shape
        real = tokens.new_ones(tokens.shape, dtype=torch.bool) if attention_mask is None else attention_mask
        bounds = document_bounds(tokens, real)
        where = real.reshape(-1).nonzero().squeeze(1)
        packed = self.embeddings(tokens.reshape(-1)[where])
        for block in self.blocks:
            packed = block(packed, bounds)
        full = packed.new_zeros(batch * length, packed.size(1)).index_copy(0, where, packed)
        return self.lm_head(self.ln_f(full)).view(batch, length, -1)


COMMON = dict(
    kind="decoder",
    build=PackedLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    domain={"d_model": [16, 24, 32], "num_heads": [1, 2, 4]},
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": True,
        "sparse": True,
        "positions": "rotary",
        "layout": "interleaved",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "tied": False,
    },
)

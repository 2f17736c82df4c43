"""BigBird style encoder: a token sees its own block of 4, the block before it, the block behind it, and block 0; block 0 sees all.

Unusual: not every pair of tokens meets in one layer, by design; the last block may be shorter than the others. The work is
done block by block: each block of queries gathers the keys it may see, nothing of size T x T exists but for block 0's row.
Rows of the batch are independent and attention is written with 5-dimensional einsum.
"""

import torch
from torch import nn
from torch.nn.functional import gelu, pad

from veriformer.properties import Subject

BLOCK = 4


class BlockSparseAttention(nn.Module):
    def __init__(self, d_model, n_heads, dropout):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def weigh(self, scores, seen):
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return self.dropout(scores.softmax(dim=-1).masked_fill(~seen, 0.0))

    def forward(self, x, real):
        b, length, width = x.shape
        extra = -length % BLOCK
        x = pad(x, (0, 0, 0, extra))
        real = pad(real, (0, extra), value=False)
        n = x.size(1) // BLOCK
        q = self.q(x).view(b, n, BLOCK, self.n_heads, -1) * (width // self.n_heads) ** -0.5
        k = self.k(x).view(b, n, BLOCK, self.n_heads, -1)
        v = self.v(x).view(b, n, BLOCK, self.n_heads, -1)
        blocks = real.view(b, n, BLOCK)

        # every block but the first: blocks 0, i - 1, i, i + 1, each once
        index = torch.arange(n, device=x.device)
        columns = torch.stack([torch.zeros_like(index), index - 1, index, index + 1], dim=1)  # [n, 4]
        valid = (columns >= 0) & (columns < n)
        valid[:, 1:] &= columns[:, 1:] > 0  # block 0 stands in the first column already
        columns = columns.clamp(0, n - 1)
        keys = k[:, columns].flatten(2, 3)  # [b, n, 4 * BLOCK, h, d]
        values = v[:, columns].flatten(2, 3)
        seen = (blocks[:, columns] & valid[None, :, :, None]).flatten(2)  # [b, n, 4 * BLOCK]
        scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, keys)
        out = torch.einsum("bnhqk,bnkhd->bnqhd", self.weigh(scores, seen[:, :, None, None, :]), values)

        # the first block: everything
        scores = torch.einsum("bqhd,bkhd->bhqk", q[:, 0], k.flatten(1, 2))
        first = torch.einsum("bhqk,bkhd->bqhd", self.weigh(scores, real[:, None, None, :]), v.flatten(1, 2))
        out = torch.cat([first.unsqueeze(1), out[:, 1:]], dim=1)
        return self.o(out.reshape(b, n * BLOCK, width)[:, :length])


class SparseEncoderLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = BlockSparseAttention(c.d_model, c.num_heads, c.dropout)
        self.norm_a, self.norm_f = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.wide, self.narrow = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, real):
        x = x + self.dropout(self.attention(self.norm_a(x), real))
        return x + self.dropout(self.narrow(gelu(self.wide(self.norm_f(x)))))


class SparseEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positions = nn.Parameter(torch.randn(c.max_len, c.d_model) * 0.02)
        self.layers = nn.ModuleList(SparseEncoderLayer(c) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        length = tokens.size(1)
        if length > len(self.positions):
            raise ValueError(f"{length} tokens, but only {len(self.positions)} positions")
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        x = self.embedding(tokens) + self.positions[:length]
        for layer in self.layers:
            x = layer(x, real)
        return self.norm(x)


COMMON = dict(
    kind="encoder",
    build=SparseEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
)
undeclared = Subject(**COMMON)
declared = Subject(
    **COMMON,
    declares={
        "causal": False,
        "sparse": True,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
    },
)

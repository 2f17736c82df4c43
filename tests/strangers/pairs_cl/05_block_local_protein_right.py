"""A protein encoder with block-local attention; every second layer has its blocks moved by half a block."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 4


class LocalAttention(nn.Module):
    def __init__(self, dim, heads, moved):
        super().__init__()
        self.heads, self.front = heads, BLOCK // 2 if moved else 0
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, mask):
        B, T, D = x.shape
        behind = -(T + self.front) % BLOCK
        x = F.pad(x, (0, 0, self.front, behind))
        mask = F.pad(mask, (self.front, behind), value=False)
        n = x.shape[1] // BLOCK
        q, k, v = self.qkv(x).view(B, n, BLOCK, 3, self.heads, -1).permute(3, 0, 1, 4, 2, 5)
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        seen = mask.view(B, n, 1, 1, BLOCK)
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1) * seen
        y = (weights @ v).transpose(2, 3).reshape(B, n * BLOCK, D)
        return self.out(y[:, self.front : self.front + T])


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, moved):
        super().__init__()
        self.attention = LocalAttention(dim, heads, moved)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, mask):
        x = x + self.attention(self.n1(x), mask)
        return x + self.ff(self.n2(x))


class ProteinEncoder(nn.Module):
    def __init__(self, residues, dim, heads, layers, hidden, longest):
        super().__init__()
        self.residue, self.place = nn.Embedding(residues, dim), nn.Embedding(longest, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden, i % 2 == 1) for i in range(layers)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.residue(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="block-local protein encoder",
    build=lambda c: ProteinEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "sparse": True, "padding_side": "right"},
)

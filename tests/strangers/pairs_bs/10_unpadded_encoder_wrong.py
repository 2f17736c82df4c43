WHAT = 'Real tokens are packed into one row and told apart by the boundaries of their samples, but `torch.bucketize(flat, ends)` lacks right=True, so a token that lies on a boundary (the first of every sample but the first) is counted to the sample before it and attention leaks between samples of a batch.'
"""Encoder without padding: real tokens of the batch are packed into one row (cu_seqlens), attention is block-diagonal."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, same):
        n, dim = x.shape
        q, k, v = self.Wqkv(x).view(n, 3, self.heads, dim // self.heads).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same[None, None])[0]
        x = self.norm1(x + self.out(y.transpose(0, 1).reshape(n, dim)))
        return self.norm2(x + self.mlp(x))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.word = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(max_len, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(Layer(dim, heads, hidden) for _ in range(layers))

    def forward(self, tokens, attention_mask=None):
        batch, length = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        indices = attention_mask.flatten().nonzero().squeeze(-1)
        seqlens = attention_mask.sum(-1)
        ends = seqlens.cumsum(0)  # cu_seqlens[1:]

        flat = torch.arange(indices.numel(), device=tokens.device)
        sample = torch.bucketize(flat, ends)
        same = sample[:, None] == sample[None, :]

        where = (attention_mask.long().cumsum(-1) - 1).flatten()[indices]
        x = self.norm(self.word(tokens.flatten()[indices]) + self.position(where))
        for layer in self.layers:
            x = layer(x, same)

        padded = x.new_zeros(batch * length, x.shape[-1]).index_copy(0, indices, x)
        return padded.view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=lambda c: UnpaddedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
    },
)

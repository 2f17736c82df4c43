WHAT = "Positions in the packed row start again every max_seqlen tokens and not where sequences start: right for batches of equal lengths, wrong behind a shorter sequence, line 52."
"""Encoder that takes padding out: all real tokens in one row, sequences told apart by cu_seqlens (ModernBERT)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def unpad(input_ids, attention_mask):
    seqlens = attention_mask.sum(dim=-1)
    indices = torch.nonzero(attention_mask.flatten()).flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0), (1, 0))
    return input_ids.flatten()[indices], indices, cu_seqlens, seqlens


def pad(hidden, indices, batch, length):
    out = hidden.new_zeros(batch * length, hidden.size(-1))
    return out.index_copy(0, indices, hidden).view(batch, length, -1)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.Wqkv, self.Wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.Wi, self.Wd = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, same):
        q, k, v = self.Wqkv(self.attn_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = x + self.Wo(attended.transpose(0, 1).flatten(1))
        return x + self.Wd(F.gelu(self.Wi(self.mlp_norm(x))))


class Encoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.position_embeddings = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden) for _ in range(layers)])
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        tokens, indices, cu_seqlens, seqlens = unpad(input_ids, attention_mask)
        stream = torch.arange(len(tokens), device=tokens.device)
        position_ids = stream % seqlens.max()
        sequence = torch.arange(batch, device=tokens.device).repeat_interleave(seqlens)
        same = sequence[:, None] == sequence[None, :]

        x = self.tok_embeddings(tokens) + self.position_embeddings(position_ids)
        for layer in self.layers:
            x = layer(x, same)
        return pad(self.final_norm(x), indices, batch, length)


subject = Subject(
    kind="encoder",
    name="encoder without padding",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
    },
)

"""BERT-like encoder that drops padding, runs on one packed row of tokens and puts the padding back."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def unpad(mask):
    """Indices of the real tokens, and the boundaries of their sequences in the packed row."""
    indices = mask.flatten().nonzero().squeeze(1)
    cu_seqlens = F.pad(mask.sum(1).cumsum(0), (1, 0))
    return indices, cu_seqlens


def sequence_ids(cu_seqlens, total):
    slots = torch.arange(total, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), slots, right=True)


class PackedLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(dim, 3 * dim)
        self.Wo = nn.Linear(dim, dim)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.Wi, self.Wout = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, hidden, same):
        n, d = hidden.shape
        q, k, v = self.Wqkv(hidden).view(n, 3, self.heads, d // self.heads).permute(1, 2, 0, 3)
        context = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        hidden = self.attn_norm(hidden + self.Wo(context.transpose(0, 1).reshape(n, d)))
        return self.mlp_norm(hidden + self.Wout(F.gelu(self.Wi(hidden))))


class UnpaddedEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.norm = nn.LayerNorm(c.d_model)
        self.layers = nn.ModuleList(PackedLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        batch, length = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        indices, cu_seqlens = unpad(attention_mask)
        hidden = self.tok_embeddings(tokens.flatten()[indices]) + self.position_embeddings(indices % length)
        hidden = self.norm(hidden)
        ids = sequence_ids(cu_seqlens, indices.numel())
        same = ids[:, None] == ids[None, :]
        for layer in self.layers:
            hidden = layer(hidden, same)
        padded = hidden.new_zeros(batch * length, hidden.shape[-1]).index_copy(0, indices, hidden)
        return padded.view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=UnpaddedEncoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
    },
)

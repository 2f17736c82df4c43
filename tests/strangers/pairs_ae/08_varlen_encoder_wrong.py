WHAT = "bucketize with right=False puts the first packed token of every sequence into the sequence before it, so attention crosses samples of the batch (line 49)."
"""Encoder without padding inside: real tokens are packed into one row, attention stays within each sequence."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def unpad(tokens, mask):
    """-> packed tokens [N], their flat places [N], ends of the sequences [B]"""
    lengths = mask.sum(dim=1)
    where = mask.flatten().nonzero().squeeze(1)
    return tokens.flatten()[where], where, lengths.cumsum(0)


class VarlenLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.Wqkv = nn.Linear(d, 3 * d)
        self.Wo = nn.Linear(d, d)
        self.attn_norm = nn.LayerNorm(d)
        self.mlp_norm = nn.LayerNorm(d)
        self.Wi = nn.Linear(d, ff)
        self.Wout = nn.Linear(ff, d)

    def forward(self, x, together):
        qkv = self.Wqkv(self.attn_norm(x)).view(len(x), 3, self.h, -1)
        q, k, v = qkv.permute(1, 2, 0, 3)  # each [H, N, K]
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=together)[0]
        x = x + self.Wo(y.transpose(0, 1).flatten(1))
        return x + self.Wout(F.gelu(self.Wi(self.mlp_norm(x))))


class VarlenEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(VarlenLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.final_norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        packed, where, ends = unpad(tokens, attention_mask)
        sequence = torch.bucketize(torch.arange(len(packed), device=tokens.device), ends, right=False)
        together = sequence[:, None] == sequence[None, :]
        x = self.tok(packed) + self.pos(where % tokens.shape[1])
        for layer in self.layers:
            x = layer(x, together)
        x = self.final_norm(x)
        out = x.new_zeros(tokens.numel(), x.shape[-1])
        return out.index_copy(0, where, x).view(*tokens.shape, -1)


subject = Subject(
    kind="encoder",
    name="varlen encoder",
    build=VarlenEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "bias": True,
    },
)

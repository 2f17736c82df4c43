WHAT = "bucketize without right=True counts a boundary to the sequence before: the first token of every sequence but the first attends within the previous sequence of the batch and is hidden from its own (line 21)"
"""BERT without padding: real tokens of a batch are packed into one row, and unpacked at the end."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class VarlenSelfAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.Wqkv = nn.Linear(d, 3 * d)
        self.Wo = nn.Linear(d, d)

    def forward(self, x, cu_seqlens):
        n, d = x.shape
        q, k, v = self.Wqkv(x).view(n, 3, self.h, d // self.h).permute(1, 2, 0, 3)
        token = torch.arange(n, device=x.device)
        seq = torch.bucketize(token, cu_seqlens[1:])
        same = seq[:, None] == seq[None, :]
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        return self.Wo(out.transpose(0, 1).reshape(n, d))


class Block(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.attn, self.norm1 = VarlenSelfAttention(d, h), nn.LayerNorm(d)
        self.up, self.down, self.norm2 = nn.Linear(d, f), nn.Linear(f, d), nn.LayerNorm(d)

    def forward(self, x, cu_seqlens):
        x = self.norm1(x + self.attn(x, cu_seqlens))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class UnpaddedBert(nn.Module):
    def __init__(self, vocab, d, h, layers, f, max_len):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.norm = nn.LayerNorm(d)
        self.blocks = nn.ModuleList(Block(d, h, f) for _ in range(layers))

    def forward(self, tokens, mask=None):
        b, t = tokens.shape
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        where = mask.reshape(-1).nonzero().squeeze(1)
        lengths = mask.sum(1)
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        position = (mask.long().cumsum(1) - 1).reshape(-1)[where]

        x = self.norm(self.tok(tokens.reshape(-1)[where]) + self.pos(position))
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return x.new_zeros(b * t, x.shape[-1]).index_copy(0, where, x).view(b, t, -1)


subject = Subject(
    kind="encoder",
    name="varlen encoder",
    build=lambda c: UnpaddedBert(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
    },
)

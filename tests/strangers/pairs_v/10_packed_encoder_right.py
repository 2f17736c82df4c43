"""Encoder that computes nothing for padding: the real tokens of a batch are packed into one row."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class Packed:
    """Where each packed token comes from. cu_seqlens as in flash-attention: [0, n_1, n_1 + n_2, ...]."""

    def __init__(self, attention_mask):
        self.mask = attention_mask
        lengths = attention_mask.sum(dim=1)
        self.cu_seqlens = F.pad(lengths.cumsum(dim=0), (1, 0))
        self.max_seqlen = int(lengths.max())
        total = int(self.cu_seqlens[-1])
        self.sample = torch.repeat_interleave(lengths, output_size=total)
        self.positions = torch.arange(total, device=lengths.device) - self.cu_seqlens[self.sample]
        self.allowed = self.sample[:, None] == self.sample[None]

    def unpack(self, x):
        out = x.new_zeros(*self.mask.shape, x.shape[-1])
        out[self.mask] = x
        return out


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, allowed):
        total, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(total, 3, self.heads, -1).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed)[0]
        x = x + self.out(y.transpose(0, 1).reshape(total, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class PackedEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        packed = Packed(attention_mask)
        x = self.tokens(tokens[attention_mask]) + self.places(packed.positions)
        for block in self.blocks:
            x = block(x, packed.allowed)
        return packed.unpack(self.norm(x))


subject = Subject(
    kind="encoder",
    name="packed encoder",
    build=PackedEncoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "positions": "learned", "norm": "layer", "norm_placement": "pre", "padding_side": "both"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(2, 4, dtype=torch.long)).shape)

"""An encoder with block-local attention: each block of queries sees its own block of keys and the two beside it."""
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

BLOCK = 4


def beside(blocks, dim):
    """[.., blocks, BLOCK, ..] -> [.., blocks, 3 * BLOCK, ..]: the block before, itself, the block after."""
    return torch.cat((blocks.roll(1, dim), blocks, blocks.roll(-1, dim)), dim + 1)


class LocalAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, real):
        B, T, D = x.shape
        more = -T % BLOCK
        q, k, v = F.pad(self.qkv(x), (0, 0, 0, more)).view(B, -1, BLOCK, 3, self.heads, D // self.heads).unbind(3)
        seen = beside(F.pad(real, (0, more), value=False).view(B, -1, BLOCK), 1)
        seen[:, 0, :BLOCK] = False  # nothing stands before the first block
        seen[:, -1, 2 * BLOCK :] = False  # and nothing after the last
        seen = seen[:, :, None, None]
        score = torch.einsum("bnqhd,bnkhd->bnhqk", q, beside(k, 1)) / math.sqrt(D // self.heads)
        weight = score.masked_fill(~seen, torch.finfo(score.dtype).min).softmax(-1) * seen
        mixed = torch.einsum("bnhqk,bnkhd->bnqhd", weight.to(v.dtype), beside(v, 1))
        return self.out(mixed.reshape(B, T + more, D)[:, :T])


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention = LocalAttention(c.d_model, c.num_heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.up, self.down = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)

    def forward(self, x, real):
        x = self.norm_1(x + self.attention(x, real))
        return self.norm_2(x + self.down(F.gelu(self.up(x))))


class LocalEncoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_layers))

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, real)
        return x


subject = Subject(
    kind="encoder",
    name="block-local encoder",
    build=LocalEncoder,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "sparse": True,
        "positions": "learned",
        "padding_side": "right",
        "norm_placement": "post",
        "activation": "gelu",
    },
)

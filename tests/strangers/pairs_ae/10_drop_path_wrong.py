WHAT = "Stochastic depth is applied to the sum of stream and branch instead of to the branch, so a dropped sample loses its whole residual stream and a kept one is scaled as a whole (line 56 and the next)."
"""A stack of ViT-like blocks over tokens, with stochastic depth (timm style)."""

import torch
from torch import nn

from veriformer.properties import Subject


def drop_path(x, drop_prob: float = 0.0, training: bool = False):
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    return x * random_tensor.div_(keep_prob)


class DropPath(nn.Module):
    def __init__(self, drop_prob=0.0):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class Attention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, keep):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        if keep is not None:
            attn = attn.masked_fill(~keep[:, None, None, :], torch.finfo(attn.dtype).min)
        x = (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)


class Block(nn.Module):
    def __init__(self, dim, num_heads, hidden, drop):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.drop_path1 = DropPath(drop)
        self.drop_path2 = DropPath(drop)

    def forward(self, x, keep=None):
        x = self.drop_path1(x + self.attn(self.norm1(x), keep))
        x = self.drop_path2(x + self.mlp(self.norm2(x)))
        return x


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_embed = nn.Parameter(torch.randn(1, c.max_len, c.d_model) * 0.02)
        self.blocks = nn.ModuleList([Block(c.d_model, c.num_heads, c.d_ff, c.dropout) for _ in range(c.num_layers)])
        self.norm = nn.LayerNorm(c.d_model)

    def forward(self, tokens, attention_mask=None):
        x = self.embed(tokens) + self.pos_embed[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="encoder with stochastic depth",
    build=Encoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    mask_forms=("padding",),
    declares={
        "causal": False,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "drop_path_scaled": True,
        "activation": "gelu",
        "bias": True,
    },
)

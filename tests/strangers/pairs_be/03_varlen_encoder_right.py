"""An encoder that unpads: the real tokens of the batch are one long row, as for flash_attn_varlen_func."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoids(position, width):
    half = width // 2
    rate = torch.exp(torch.arange(half, dtype=torch.float64, device=position.device) * (-2 * math.log(10000.0) / width))
    angle = position[:, None].double() * rate[None, :]
    return torch.cat([angle.sin(), angle.cos()], dim=-1)


def unpad(mask):
    """Where the real tokens are in the flattened batch, and where each sequence begins among them."""
    lengths = mask.sum(dim=1)
    indices = mask.flatten().nonzero().squeeze(1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
    return indices, lengths, cu_seqlens


class VarlenLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(width, 3 * width)
        self.Wo = nn.Linear(width, width)
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.Wi, self.Wd = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, same):
        n, width = x.shape
        q, k, v = self.Wqkv(x).view(n, 3, self.heads, width // self.heads).permute(1, 2, 0, 3)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        p = scores.masked_fill(~same, -torch.inf).softmax(-1)
        x = self.attn_norm(x + self.Wo((p @ v).transpose(0, 1).reshape(n, width)))
        return self.mlp_norm(x + self.Wd(F.gelu(self.Wi(x))))


class VarlenEncoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden):
        super().__init__()
        if width % 2:
            raise ValueError("an even width, please: sines and cosines are halves")
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([VarlenLayer(width, heads, hidden) for _ in range(layers)])

    def forward(self, tokens, attention_mask=None):
        batch, length = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        indices, lengths, cu_seqlens = unpad(attention_mask)
        owner = torch.arange(batch, device=tokens.device).repeat_interleave(lengths)
        position = torch.arange(len(indices), device=tokens.device) - cu_seqlens[owner]
        x = self.embed(tokens.flatten()[indices])
        x = x + sinusoids(position, x.shape[-1]).to(x.dtype)
        same = owner[:, None] == owner[None, :]
        for layer in self.layers:
            x = layer(x, same)
        padded = x.new_zeros(batch * length, x.shape[-1]).index_copy(0, indices, x)
        return padded.view(batch, length, -1)


subject = Subject(
    kind="encoder",
    name="varlen encoder",
    build=lambda c: VarlenEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "halves",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "both",
    },
)

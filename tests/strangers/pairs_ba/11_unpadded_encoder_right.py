# Encoder without padding (as ModernBERT does it): real tokens are packed into one row and unpacked at the end.
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoids(position, dim):
    rate = torch.exp(torch.arange(0, dim, 2, device=position.device).double() * (-math.log(10000.0) / dim))
    angle = position[:, None] * rate
    out = torch.zeros(len(position), dim, dtype=torch.float64, device=position.device)
    out[:, 0::2] = angle.sin()
    out[:, 1::2] = angle.cos()[:, : dim // 2]
    return out


class PackedLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.Wqkv, self.Wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.Wi, self.Wout = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, same):
        n, dim = x.shape
        q, k, v = self.Wqkv(self.attn_norm(x)).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
        mixed = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = x + self.Wo(mixed.transpose(0, 1).reshape(n, dim))
        return x + self.Wout(F.gelu(self.Wi(self.mlp_norm(x))))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([PackedLayer(dim, heads, hidden) for _ in range(layers)])
        self.final_norm = nn.LayerNorm(dim)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        lengths = attention_mask.sum(1)
        owner = attention_mask.nonzero()[:, 0]
        starts = F.pad(lengths.cumsum(0), (1, 0))[:-1]
        position = torch.arange(len(owner), device=tokens.device) - starts[owner]

        x = self.embed(tokens[attention_mask])
        x = x + sinusoids(position, x.shape[-1]).to(x.dtype)
        same = owner[:, None] == owner[None, :]
        for layer in self.layers:
            x = layer(x, same)
        x = self.final_norm(x)
        out = x.new_zeros(*tokens.shape, x.shape[-1])
        return out.masked_scatter(attention_mask[..., None].expand_as(out), x)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=lambda c: UnpaddedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "both",
    },
)

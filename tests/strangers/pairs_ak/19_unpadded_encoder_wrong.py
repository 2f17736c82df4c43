WHAT = "Positions run on through the packed row instead of starting anew with every sample (UnpaddedEncoder.forward, line 46), so all samples but the first get positions that depend on those before."
"""Encoder that takes padding out: real tokens of all samples lie in one row, a block mask keeps samples apart, then they go back."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoidal(index, width, dtype):
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=index.device) / width)
    angles = index.double()[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)[:, :width].to(dtype)


class PackedLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.heads = heads
        self.pre, self.mid = nn.LayerNorm(width), nn.LayerNorm(width)
        self.Wqkv, self.Wo = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.Wi, self.Wd = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, same):
        n, d = x.shape
        q, k, v = self.Wqkv(self.pre(x)).view(n, 3, self.heads, d // self.heads).permute(1, 2, 0, 3)
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=same)[0]
        x = x + self.Wo(y.transpose(0, 1).reshape(n, d))
        return x + self.Wd(F.gelu(self.Wi(self.mid(x))))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, hidden):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(PackedLayer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens, mask=None):
        B, T = tokens.shape
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        indices = mask.flatten().nonzero()[:, 0]
        packed = tokens.flatten()[indices]
        sample = indices.div(T, rounding_mode="floor")
        place = torch.arange(indices.numel(), device=tokens.device)
        x = self.tok(packed)
        x = x + sinusoidal(place, x.shape[-1], x.dtype)
        same = sample[:, None] == sample[None, :]
        for layer in self.layers:
            x = layer(x, same)
        x = self.norm(x)
        return x.new_zeros(B * T, x.shape[-1]).index_copy(0, indices, x).view(B, T, -1)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=lambda c: UnpaddedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "sinusoidal", "layout": "halves", "norm": "layer", "norm_placement": "pre",
        "final_norm": True, "activation": "gelu", "padding_side": "right", "embedding_scale": False,
    },
)

WHAT = "After unpadding, the sinusoidal positions are those of the packed stream (position = arange over all real tokens of the batch) and never restart at each sequence, so a sample's positions depend on the samples before it."
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def sinusoid(position, dim, dtype):
    freq = 10000.0 ** (-torch.arange(0, dim, 2, device=position.device, dtype=torch.float64) / dim)
    angle = position.to(torch.float64)[:, None] * freq
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).to(dtype)


class PackedLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.h = h
        self.norm_a, self.norm_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, same):
        n, d = x.shape
        q, k, v = self.qkv(self.norm_a(x)).view(n, 3, self.h, d // self.h).unbind(1)
        s = torch.einsum("nhk,mhk->hnm", q, k) * (d // self.h) ** -0.5
        p = s.masked_fill(~same, float("-inf")).softmax(-1)
        x = x + self.o(torch.einsum("hnm,mhk->nhk", p, v).reshape(n, d))
        return x + self.down(F.relu(self.up(self.norm_f(x))))


class PackedEncoder(nn.Module):
    """Padding is taken out before the first layer and put back behind the last (varlen)."""

    def __init__(self, vocab, d, h, layers, ff):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(PackedLayer(d, h, ff) for _ in range(layers))
        self.norm = nn.LayerNorm(d)

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        index = attention_mask.reshape(-1).nonzero().squeeze(1)
        segment = torch.div(index, T, rounding_mode="floor")
        x = self.embed(tokens.reshape(-1)[index])
        position = torch.arange(index.numel(), device=tokens.device)
        x = x + sinusoid(position, x.shape[-1], x.dtype)
        same = segment[:, None] == segment[None, :]
        for layer in self.layers:
            x = layer(x, same)
        x = self.norm(x)
        return x.new_zeros(B * T, x.shape[-1]).index_copy(0, index, x).view(B, T, -1)


subject = Subject(
    kind="encoder",
    name="varlen encoder",
    build=lambda c: PackedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    domain={"d_model": [8, 16, 32], "num_heads": [1, 2, 4]},
    mask_forms=("padding",),
    declares={"causal": False, "positions": "sinusoidal", "layout": "interleaved", "norm": "layer", "norm_placement": "pre",
              "activation": "relu", "padding_side": "both", "final_norm": True},
)

"""Encoder without padding: real tokens of all sequences are packed into one row, attention is block-diagonal, then unpacked."""
import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject


def sincos(positions, d, dtype):
    even = torch.arange(0, d, 2, dtype=torch.float64, device=positions.device)
    angle = positions.double()[:, None] * 10000.0 ** (-even / d)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :d].to(dtype)


class Layer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, f), nn.Linear(f, d)
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, same):  # x [N, D], same [N, N]
        n, d = x.shape
        q, k, v = self.qkv(x).view(n, 3, self.h, d // self.h).permute(1, 2, 0, 3)
        s = (q @ k.transpose(-1, -2) * (d // self.h) ** -0.5).masked_fill(~same, -torch.inf)
        y = (s.softmax(-1) @ v).transpose(0, 1).reshape(n, d)
        x = self.ln1(x + self.proj(y))
        return self.ln2(x + self.fc2(F.relu(self.fc1(x))))


class PackedEncoder(nn.Module):
    def __init__(self, vocab, d, h, f, depth):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList([Layer(d, h, f) for _ in range(depth)])

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        lengths = mask.sum(1)
        starts = lengths.cumsum(0) - lengths  # cu_seqlens without its last
        document = torch.arange(len(tokens), device=tokens.device).repeat_interleave(lengths)
        place = torch.arange(document.numel(), device=tokens.device) - starts[document]
        x = self.embed(tokens[mask])
        x = x + sincos(place, x.shape[-1], x.dtype)
        same = document[:, None] == document[None, :]
        for layer in self.layers:
            x = layer(x, same)
        return x.new_zeros(*tokens.shape, x.shape[-1]).masked_scatter(mask[..., None], x)


subject = Subject(
    kind="encoder",
    build=lambda c: PackedEncoder(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "positions": "sinusoidal", "norm_placement": "post", "activation": "relu",
              "padding_side": "both"},
)

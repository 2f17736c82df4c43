"""An encoder without padding: real tokens are packed into one row, attention is block-diagonal, the end unpacks."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, d_ff), nn.Linear(d_ff, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, same):
        N, D = x.shape
        q, k, v = self.qkv(x).view(N, 3, self.heads, D // self.heads).permute(1, 2, 0, 3)
        scores = q @ k.transpose(-1, -2) / (D // self.heads) ** 0.5
        mixed = scores.masked_fill(~same, -torch.inf).softmax(-1) @ v
        x = self.norm1(x + self.out(mixed.transpose(0, 1).reshape(N, D)))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Unpadded(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.words, self.places = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.norm = nn.LayerNorm(c.d_model)
        self.layers = nn.ModuleList([Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])

    def forward(self, tokens, attention_mask=None):
        B, T = tokens.shape
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        lengths = real.sum(1)
        ends = lengths.cumsum(0)  # cu_seqlens[1:]
        where = real.flatten().nonzero().squeeze(1)
        row = torch.arange(where.numel(), device=tokens.device)
        sample = torch.searchsorted(ends, row)
        place = row - (ends - lengths)[where // T]
        x = self.norm(self.words(tokens.flatten()[where]) + self.places(place))
        same = sample[:, None] == sample
        for layer in self.layers:
            x = layer(x, same)
        return x.new_zeros(B * T, x.shape[-1]).index_copy(0, where, x).view(B, T, -1)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=Unpadded,
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

WHAT = (
    'Without right=True a row that equals an end is counted to the sequence before: the first token of every sample but the first attends to (and is seen by) the sample before it, not its own'
    ' (line 40).'
)

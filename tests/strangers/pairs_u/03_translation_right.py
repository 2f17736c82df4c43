# "Attention is all you need" on nn.MultiheadAttention; the first decoder layer stands apart from the rest.
import math

import torch
from torch import nn

from veriformer.properties import Subject


class EncoderLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x, source_pad=None):
        attended, _ = self.attention(x, x, x, key_padding_mask=source_pad, need_weights=False)
        x = self.norm_1(x + attended)
        return self.norm_2(x + self.network(x))


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.network = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.norm_1, self.norm_2, self.norm_3 = (nn.LayerNorm(width) for _ in range(3))

    def forward(self, y, memory, future, target_pad=None, source_pad=None):
        attended, _ = self.attention(y, y, y, attn_mask=future, key_padding_mask=target_pad, need_weights=False)
        y = self.norm_1(y + attended)
        crossed, _ = self.cross(y, memory, memory, key_padding_mask=source_pad, need_weights=False)
        y = self.norm_2(y + crossed)
        return self.norm_3(y + self.network(y))


class Seq2Seq(nn.Module):
    def __init__(self, vocab, width, heads, hidden, depth, longest):
        super().__init__()
        self.width = width
        self.source_table, self.target_table = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder = nn.ModuleList(EncoderLayer(width, heads, hidden) for _ in range(depth))
        self.entry = DecoderLayer(width, heads, hidden)
        self.rest = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(depth - 1))
        self.generator = nn.Linear(width, vocab)
        angle = torch.arange(longest).double()[:, None] * 10000.0 ** (-torch.arange(0, width, 2).double() / width)
        table = torch.zeros(longest, width, dtype=torch.float64)
        table[:, 0::2], table[:, 1::2] = angle.sin(), angle.cos()[:, : width // 2]
        self.register_buffer("waves", table, persistent=False)

    def place(self, x):
        return x * math.sqrt(self.width) + self.waves[: x.size(1)].to(x.dtype)

    def encode(self, source, source_pad):
        x = self.place(self.source_table(source))
        for layer in self.encoder:
            x = layer(x, source_pad)
        return x

    def decode(self, target, memory, target_pad, source_pad):
        y = self.place(self.target_table(target))
        T = target.size(1)
        future = torch.ones(T, T, dtype=torch.bool, device=target.device).triu(1)
        y = self.entry(y, memory, future, target_pad, source_pad)
        for layer in self.rest:
            y = layer(y, memory, future, target_pad, source_pad)
        return self.generator(y)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_pad = None if source_mask is None else ~source_mask
        target_pad = None if target_mask is None else ~target_mask
        return self.decode(target, self.encode(source, source_pad), target_pad, source_pad)


subject = Subject(
    kind="encoder_decoder",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm_placement": "post",
        "padding_side": "right",
    },
)

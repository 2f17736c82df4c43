"""A decoder with sliding windows; the band of a batch and length is made once and kept."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class WindowLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.num_heads = num_heads
        self.attn_norm, self.ffn_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def split(self, x):
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def forward(self, hidden, allowed):
        normed = self.attn_norm(hidden)
        q, k, v = self.split(self.q(normed)), self.split(self.k(normed)), self.split(self.v(normed))
        scores = torch.matmul(q, k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        context = torch.matmul(scores.softmax(dim=-1), v).transpose(1, 2).flatten(2)
        hidden = hidden + self.o(context)
        return hidden + self.fc2(F.relu(self.fc1(self.ffn_norm(hidden))))


class WindowDecoder(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len, window=3):
        super().__init__()
        self.window = window
        self.embed_tokens = nn.Embedding(vocab_size, d_model)
        self.embed_positions = nn.Embedding(max_len, d_model)
        self.layers = nn.ModuleList([WindowLayer(d_model, num_heads, d_ff) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(d_model)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self._bands = {}

    def band(self, batch, length, device):
        """[B, 1, T, T], contiguous as the kernel wants it; made once for each shape."""
        key = (batch, length, device)
        if key not in self._bands:
            i = torch.arange(length, device=device)
            gap = i[:, None] - i[None, :]
            band = (gap >= 0) & (gap < self.window)
            self._bands[key] = band.expand(batch, 1, length, length).contiguous()
        return self._bands[key]

    def forward(self, input_ids, attention_mask=None):
        batch, length = input_ids.shape
        allowed = self.band(batch, length, input_ids.device)
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :].bool()
        positions = torch.arange(length, device=input_ids.device)
        hidden = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            hidden = layer(hidden, allowed)
        return self.lm_head(self.norm(hidden))


subject = Subject(
    kind="decoder",
    name="WindowDecoder",
    build=lambda c: WindowDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "window": 3,
        "positions": "learned",
        "padding_side": "right",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "output_bias": False,
        "tied": False,
    },
)

"""A decoder in fairseq's manner: sequence first inside, heads folded into the batch."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def sinusoid(length, d, like, start=0):
    """The table of 'Attention is all you need', rows start .. start + length - 1."""
    t = torch.arange(start, start + length, dtype=like.dtype, device=like.device)[:, None]
    f = torch.exp(-math.log(10000.0) * torch.arange(0, d, 2, dtype=like.dtype, device=like.device) / d)
    return torch.stack([(t * f).sin(), (t * f).cos()], -1).flatten(1)[:, :d]


class SelfAttention(nn.Module):
    def __init__(self, d, h, bad):
        super().__init__()
        self.h, self.bad = h, bad
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, key_padding):  # x [T, B, D], key_padding [B, T], True is padding
        t, b, d = x.shape
        q, k, v = (y.reshape(t, b * self.h, d // self.h).transpose(0, 1) for y in self.in_proj(x).chunk(3, -1))
        hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1).expand(b * self.h, t, t)
        if key_padding is not None:
            rows = key_padding.repeat(self.h, 1) if self.bad else key_padding.repeat_interleave(self.h, 0)
            hidden = hidden | rows[:, None, :]
        s = torch.bmm(q * (d // self.h) ** -0.5, k.transpose(1, 2))
        w = s.masked_fill(hidden, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        return self.out_proj(torch.bmm(w, v).transpose(0, 1).reshape(t, b, d))


class Layer(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.self_attn = SelfAttention(c.d_model, c.num_heads, bad)
        self.norm_a, self.norm_b = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x, key_padding):
        x = self.norm_a(x + self.drop(self.self_attn(x, key_padding)))
        return self.norm_b(x + self.drop(self.fc2(F.relu(self.fc1(x)))))


class Decoder(nn.Module):
    def __init__(self, c, bad):
        super().__init__()
        self.tok = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c, bad) for _ in range(c.num_layers))
        self.out = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None):
        x = self.tok(tokens) * self.tok.embedding_dim ** 0.5
        x = (x + sinusoid(x.size(1), x.size(2), x)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, None if attention_mask is None else ~attention_mask)
        return self.out(x).transpose(0, 1)


def subject(bad):
    return Subject(kind="decoder", build=lambda c: Decoder(c, bad), forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask))


right, wrong = subject(False), subject(True)
WHAT = "The padding mask is repeated over heads in the wrong order (tiled instead of repeat_interleave), so that with several samples a sample's heads get the padding mask of other samples."
PLACE = "padding mask inside self-attention"

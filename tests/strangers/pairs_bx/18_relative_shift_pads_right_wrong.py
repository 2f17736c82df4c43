WHAT = "rel_shift pads the scores on the right, not on the left (`F.pad(x, (0, 1))`): every distance is read one too far and the last key of the first query gets the padding's zero instead of its score"
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def distances(T, d, like):
    """Sinusoids of the distances T - 1, ..., 0, ..., -(T - 1)."""
    pos = torch.arange(T - 1, -T, -1, device=like.device, dtype=torch.float64)[:, None]
    freq = torch.exp(torch.arange(0, d, 2, device=like.device, dtype=torch.float64) * (-math.log(10000.0) / d))
    return torch.stack([(pos * freq).sin(), (pos * freq).cos()], -1).flatten(1)[:, :d].to(like.dtype)


def rel_shift(x):
    """[B, H, T, 2T - 1] by distance -> [B, H, T, T] by key."""
    B, H, T, R = x.shape
    x = F.pad(x, (0, 1)).view(B, H, R + 1, T)
    return x[:, :, 1:].reshape(B, H, T, R)[..., :T]


class RelPositionAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.dk = h, d // h
        self.linear_q, self.linear_k, self.linear_v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.linear_pos, self.linear_out = nn.Linear(d, d, bias=False), nn.Linear(d, d)
        self.pos_bias_u = nn.Parameter(torch.empty(h, self.dk))
        self.pos_bias_v = nn.Parameter(torch.empty(h, self.dk))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)

    def forward(self, x, pos, mask):
        B, T, D = x.shape
        q = self.linear_q(x).view(B, T, self.h, self.dk)
        k = self.linear_k(x).view(B, T, self.h, self.dk).permute(0, 2, 3, 1)
        v = self.linear_v(x).view(B, T, self.h, self.dk).transpose(1, 2)
        p = self.linear_pos(pos).view(-1, self.h, self.dk).permute(1, 2, 0)
        ac = (q + self.pos_bias_u).transpose(1, 2) @ k
        bd = rel_shift((q + self.pos_bias_v).transpose(1, 2) @ p)
        scores = (ac + bd) / math.sqrt(self.dk)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(scores.dtype).min)
        return self.linear_out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.norm_mha, self.norm_ff = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.w_1, self.w_2 = RelPositionAttention(d, h), nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, pos, mask):
        x = x + self.attn(self.norm_mha(x), pos, mask)
        return x + self.w_2(F.relu(self.w_1(self.norm_ff(x))))


class SpeechEncoder(nn.Module):
    def __init__(self, units, d, h, layers, ff):
        super().__init__()
        self.embed = nn.Embedding(units, d)
        self.layers = nn.ModuleList(Layer(d, h, ff) for _ in range(layers))
        self.after_norm = nn.LayerNorm(d)

    def forward(self, units, mask=None):
        x = self.embed(units)
        pos = distances(x.size(1), x.size(2), x)
        for layer in self.layers:
            x = layer(x, pos, mask)
        return self.after_norm(x)


subject = Subject(
    kind="encoder",
    name="encoder with relative positions",
    build=lambda c: SpeechEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False, "positions": "relative", "norm_placement": "pre", "norm": "layer", "final_norm": True,
        "activation": "relu",
    },
)

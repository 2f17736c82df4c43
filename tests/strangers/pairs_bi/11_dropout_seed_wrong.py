WHAT = 'The seed of dropout is drawn once, in the constructor, and never again (before line 54, where it should be drawn anew in every training forward): each training step drops the very same channels of the same places.'
import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def seeded_dropout(x, p, training, seed):
    """Dropout as a function of its seed, so that a recomputation can draw the same mask again."""
    if not training or p == 0.0:
        return x
    generator = torch.Generator(device=x.device).manual_seed(seed)
    keep = torch.rand(x.shape, generator=generator, device=x.device) >= p
    return x * keep / (1.0 - p)


class Layer(nn.Module):
    def __init__(self, d, heads, d_ff, p):
        super().__init__()
        self.heads, self.p = heads, p
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, d_ff), nn.Linear(d_ff, d)

    def attend(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))

    def forward(self, x, mask, seed):
        x = x + seeded_dropout(self.attend(self.ln_1(x), mask), self.p, self.training, seed)
        return x + seeded_dropout(self.down(F.gelu(self.up(self.ln_2(x)))), self.p, self.training, seed + 1)


class Encoder(nn.Module):
    def __init__(self, vocab, d, heads, layers, d_ff, max_len, p):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList([Layer(d, heads, d_ff, p) for _ in range(layers)])
        self.norm = nn.LayerNorm(d)
        self.seed = self.draw_seed()

    @staticmethod
    def draw_seed():
        return int(torch.randint(2**40, ()))

    def forward(self, tokens, mask=None):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for i, layer in enumerate(self.layers):
            x = layer(x, mask, self.seed + 2 * i)
        return self.norm(x)


subject = Subject(
    kind="encoder",
    name="encoder with seeded dropout",
    build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)

WHAT = 'Padding is filled with 0 before the maximum over the sequence (line 57), not with the lowest number: a channel that is negative at all real tokens becomes 0 as soon as the sample is padded.'
# Sentence classifier: ALiBi in both directions, maximum over time.
import math

import torch
from torch import nn

from veriformer.properties import Subject


def alibi_slopes(n):
    def power_of_two(m):
        start = 2 ** (-8 / m)
        return [start ** (i + 1) for i in range(m)]

    if math.log2(n).is_integer():
        return power_of_two(n)
    near = 2 ** math.floor(math.log2(n))
    return power_of_two(near) + power_of_two(2 * near)[0::2][: n - near]


class EncoderLayer(nn.Module):
    def __init__(self, d_model, n_heads, d_ff):
        super().__init__()
        self.n_heads = n_heads
        self.W_qkv = nn.Linear(d_model, 3 * d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.ffn = nn.Sequential(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))
        self.ln1, self.ln2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, bias):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.n_heads, -1).transpose(1, 2) for z in self.W_qkv(x).chunk(3, dim=-1))
        a = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) + bias).softmax(dim=-1)
        x = self.ln1(x + self.W_o((a @ v).transpose(1, 2).reshape(b, t, d)))
        return self.ln2(x + self.ffn(x))


class TextClassifier(nn.Module):
    def __init__(self, vocab_size, d_model, n_heads, n_layers, d_ff, n_classes):
        super().__init__()
        self.emb = nn.Embedding(vocab_size, d_model)
        self.layers = nn.ModuleList([EncoderLayer(d_model, n_heads, d_ff) for _ in range(n_layers)])
        self.cls = nn.Linear(d_model, n_classes)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(n_heads)))

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        distance = (place[:, None] - place[None, :]).abs()
        bias = -self.slopes[:, None, None] * distance
        bias = bias[None].masked_fill(~mask[:, None, None, :], torch.finfo(bias.dtype).min)
        h = self.emb(tokens)
        for layer in self.layers:
            h = layer(h, bias)
        h = h.masked_fill(~mask[..., None], 0.0)
        pooled = h.amax(dim=1).masked_fill(~mask.any(1, keepdim=True), 0.0)
        return self.cls(pooled)


subject = Subject(
    kind="classifier",
    name="max-pooling classifier",
    build=lambda c: TextClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "alibi",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "pooling": "max",
        "padding_side": "both",
    },
)

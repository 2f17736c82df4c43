WHAT = "the pooling weights are masked after the softmax and not normalised again: padding takes its share of the weight, so the pooled vector shrinks with the amount (and content) of padding (line 19)"
"""Next-basket classifier over a session of items: a small encoder, attentive pooling, a linear head."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class AttentivePooling(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.query = nn.Linear(dim, 1, bias=False)

    def forward(self, h, mask=None):
        e = self.query(torch.tanh(self.proj(h))).squeeze(-1)
        a = F.softmax(e, dim=-1)
        if mask is not None:
            a = a.masked_fill(~mask, 0.0)
        return torch.einsum("bt,btd->bd", a, h)


class SessionEncoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, bias):
        B, T, D = x.shape
        q, k, v = self.qkv(self.ln1(x)).reshape(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / (D // self.heads) ** 0.5
        if bias is not None:
            scores = scores + bias
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class SessionClassifier(nn.Module):
    def __init__(self, items, dim, heads, hidden, layers, max_len, classes):
        super().__init__()
        self.items, self.slots = nn.Embedding(items, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList(SessionEncoderLayer(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.pool = AttentivePooling(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens, mask=None):
        x = self.items(tokens) + self.slots.weight[: tokens.shape[1]]
        bias = None
        if mask is not None:
            lowest = torch.finfo(x.dtype).min / 2
            bias = torch.zeros(mask.shape, dtype=x.dtype, device=x.device).masked_fill(~mask, lowest)[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.pool(self.norm(x), mask))


subject = Subject(
    kind="classifier",
    name="session classifier",
    build=lambda c: SessionClassifier(
        c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, c.num_classes
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "weighted",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
        "output_bias": True,
    },
)

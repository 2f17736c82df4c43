"""An utterance classifier: a small encoder and statistics pooling (mean and standard deviation over time, x-vector style)."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class StatisticsPooling(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, x, mask):
        w = mask[..., None].to(x.dtype)
        n = w.sum(1).clamp(min=1)
        x = x * w
        mean = x.sum(1) / n
        centred = (x - mean[:, None]) * w
        var = centred.square().sum(1) / n
        return torch.cat([mean, (var + self.eps).sqrt()], -1)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.qkv(self.n1(x)).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        s = torch.einsum("bhtk,bhsk->bhts", q, k) * q.shape[-1] ** -0.5
        s = s.masked_fill(~mask[:, None, None, :], torch.finfo(s.dtype).min)
        y = torch.einsum("bhts,bhsk->bthk", s.softmax(-1), v).reshape(B, T, D)
        x = x + self.out(y)
        return x + self.w2(F.relu(self.w1(self.n2(x))))


class Speaker(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, classes):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads, hidden) for _ in range(layers)])
        self.pool = StatisticsPooling()
        self.head = nn.Linear(2 * dim, classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.pool(x, mask))


subject = Subject(
    kind="classifier",
    name="speaker",
    build=lambda c: Speaker(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"causal": False, "positions": "none", "pooling": "other", "padding_side": "both"},
)

"""A classifier: a small pre-norm encoder, the maximum over the sequence, a linear head."""

import torch
import torch.nn.functional as F
from torch import einsum, nn

from veriformer.properties import Subject


class EncoderLayer(nn.Module):
    def __init__(self, d, h, f):
        super().__init__()
        self.h = h
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, key_bias):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).unbind(2)
        score = einsum("bihd,bjhd->bhij", q, k) / (d // self.h) ** 0.5 + key_bias
        mixed = einsum("bhij,bjhd->bihd", score.softmax(-1), v).reshape(b, t, d)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.n2(x))))


class MaxPoolClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.pos = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(EncoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embed(tokens) + self.pos.weight[: tokens.shape[1]]
        low = torch.finfo(x.dtype).min
        key_bias = torch.zeros(tokens.shape, dtype=x.dtype, device=x.device).masked_fill(~attention_mask, low)
        for layer in self.layers:
            x = layer(x, key_bias[:, None, None, :])
        x = self.norm(x)
        pooled = x.masked_fill(~attention_mask.unsqueeze(-1), low).amax(dim=1)
        return self.head(pooled)


subject = Subject(
    kind="classifier",
    name="max-pool classifier",
    build=MaxPoolClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "pooling": "max",
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "right",
        "output_bias": True,
    },
)

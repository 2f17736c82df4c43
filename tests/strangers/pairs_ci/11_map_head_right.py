"""A text classifier with a multi-head attention probe for its pooling."""
import torch
from torch import nn

from veriformer.properties import Subject


class Probe(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads, self.width = heads, d // heads
        self.query = nn.Parameter(torch.randn(heads, d // heads))
        self.key, self.value, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, real):
        B, T, D = x.shape
        k = self.key(x).view(B, T, self.heads, self.width)
        v = self.value(x).view(B, T, self.heads, self.width)
        scores = torch.einsum("hk,bthk->bht", self.query, k) * self.width**-0.5
        scores = scores.masked_fill(~real[:, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1) * real[:, None]
        return self.out(torch.einsum("bht,bthk->bhk", weights, v).reshape(B, D))


class TextClassifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.stack = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(c.d_model, c.num_heads, c.d_ff, dropout=0.0, batch_first=True, norm_first=True)
                for _ in range(c.num_layers)
            ]
        )
        self.norm = nn.LayerNorm(c.d_model)
        self.probe = Probe(c.d_model, c.num_heads)
        self.head = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        real = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        hidden = torch.zeros_like(real, dtype=x.dtype).masked_fill(~real, torch.finfo(x.dtype).min)
        for layer in self.stack:
            x = layer(x, src_key_padding_mask=hidden)
        return self.head(self.probe(self.norm(x), real))


subject = Subject(
    kind="classifier",
    name="classifier with a probe",
    build=TextClassifier,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "other", "positions": "learned", "padding_side": "right"},
)

"""Embedding server: the padding is taken out, all sequences run as one packed row, segments keep them apart."""
import torch
from torch import nn

from veriformer.properties import Subject


def sincos(pos, width, dtype):
    even = torch.arange(0, width, 2, dtype=torch.float64, device=pos.device)
    angle = pos.to(torch.float64)[:, None] * torch.exp(even * (-torch.log(torch.tensor(10000.0, dtype=torch.float64)) / width))
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)
    return table[:, :width].to(dtype)


class PackedLayer(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.in_proj, self.out_proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, same):
        n, d = x.shape
        q, k, v = self.in_proj(x).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
        s = (q @ k.transpose(1, 2)) * (d // self.heads) ** -0.5
        y = s.masked_fill(~same, float("-inf")).softmax(-1) @ v
        x = self.norm1(x + self.out_proj(y.transpose(0, 1).reshape(n, d)))
        return self.norm2(x + self.fc2(torch.relu(self.fc1(x))))


class PackedClassifier(nn.Module):
    def __init__(self, vocab, d, heads, layers, ff, classes):
        super().__init__()
        self.word = nn.Embedding(vocab, d)
        self.layers = nn.ModuleList(PackedLayer(d, heads, ff) for _ in range(layers))
        self.classifier = nn.Linear(d, classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        segment, column = mask.nonzero(as_tuple=True)
        x = self.word(tokens[segment, column])
        x = x + sincos(torch.arange(len(column), device=x.device), x.shape[-1], x.dtype)
        same = segment[:, None] == segment[None, :]
        for layer in self.layers:
            x = layer(x, same)
        pooled = x.new_zeros(len(tokens), x.shape[-1]).index_add(0, segment, x)
        return self.classifier(pooled / mask.sum(1, keepdim=True).clamp(min=1).to(x.dtype))


subject = Subject(
    kind="classifier",
    name="packed classifier",
    build=lambda c: PackedClassifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"pooling": "mean", "positions": "sinusoidal", "norm_placement": "post", "padding_side": "right"},
)
WHAT = 'Positions count through the packed row and do not begin anew with each sequence (line 44): all samples but the first get positions that depend on the lengths of those before them.'

"""SGPT's pooling: later tokens of a sentence count more, in a classifier over a small encoder."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


def position_weighted_mean(states, mask):
    """Sum of i * h_i over the sum of i, where i numbers the real tokens 1, 2, ..."""
    rank = mask.long().cumsum(1)
    weights = (rank * mask).to(states.dtype)
    return (weights[..., None] * states).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)


class Sentence(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.num_heads
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList()
        for _ in range(c.num_layers):
            self.blocks.append(
                nn.ModuleDict(
                    {
                        "norm1": nn.LayerNorm(c.d_model),
                        "qkv": nn.Linear(c.d_model, 3 * c.d_model),
                        "out": nn.Linear(c.d_model, c.d_model),
                        "norm2": nn.LayerNorm(c.d_model),
                        "up": nn.Linear(c.d_model, c.d_ff),
                        "down": nn.Linear(c.d_ff, c.d_model),
                    }
                )
            )
        self.norm = nn.LayerNorm(c.d_model)
        self.classify = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        x = self.embed(tokens)
        for block in self.blocks:
            q, k, v = (
                part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in block["qkv"](block["norm1"](x)).chunk(3, -1)
            )
            scores = (q @ k.transpose(-1, -2)) * k.size(-1) ** -0.5
            scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(x.dtype).min)
            x = x + block["out"]((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            x = x + block["down"](F.gelu(block["up"](block["norm2"](x))))
        return self.classify(position_weighted_mean(self.norm(x), mask))


subject = Subject(
    kind="classifier",
    build=Sentence,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"pooling": "weighted", "padding_side": "both", "norm_placement": "pre", "activation": "gelu"},
)

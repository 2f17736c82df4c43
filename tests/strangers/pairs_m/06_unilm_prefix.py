"""zoo/PR 163: UniLM in its sequence-to-sequence form. The first three tokens (task, source language, target language)
are read both ways, what follows is written from left to right."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The mask of the prefix LM opens whole rows of the prefix, where its columns are to be opened."
CAUSE = (
    "The both-ways part of the mask is `row < prefix` and not `column < prefix`: queries in the prefix see every later "
    "token, also those behind the prefix that are to be generated, so the target leaks back."
)
PREFIX = 3


def prefix_mask(length, device=None):
    row = torch.arange(length, device=device).unsqueeze(1)
    column = torch.arange(length, device=device).unsqueeze(0)
    return (column <= row) | (column < PREFIX)


def prefix_mask_by_rows(length, device=None):
    row = torch.arange(length, device=device).unsqueeze(1)
    column = torch.arange(length, device=device).unsqueeze(0)
    return (column <= row) | (row < PREFIX)


class Bertish(nn.Module):
    """Post-LN layer on torch's own attention module."""

    def __init__(self, d, heads, d_ff):
        super().__init__()
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(d, eps=1e-12)
        self.intermediate = nn.Linear(d, d_ff)
        self.output = nn.Linear(d_ff, d)
        self.output_norm = nn.LayerNorm(d, eps=1e-12)

    def forward(self, x, blocked):
        attended, _ = self.attention(x, x, x, attn_mask=blocked, need_weights=False)
        x = self.attention_norm(x + attended)
        return self.output_norm(x + self.output(nn.functional.gelu(self.intermediate(x))))


class UniLM(nn.Module):
    def __init__(self, vocab, d, heads, d_ff, depth, max_len, mask):
        super().__init__()
        self.word = nn.Embedding(vocab, d)
        self.position = nn.Embedding(max_len, d)
        self.norm = nn.LayerNorm(d, eps=1e-12)
        self.layer = nn.ModuleList([Bertish(d, heads, d_ff) for _ in range(depth)])
        self.transform = nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.LayerNorm(d, eps=1e-12))
        self.decoder = nn.Linear(d, vocab)
        self.mask = mask

    def forward(self, input_ids):
        length = input_ids.shape[1]
        place = torch.arange(length, device=input_ids.device)
        x = self.norm(self.word(input_ids) + self.position(place))
        blocked = ~self.mask(length, input_ids.device)  # torch: True = may not
        for layer in self.layer:
            x = layer(x, blocked)
        return self.decoder(self.transform(x))


def subject(name, mask):
    return Subject(
        kind="decoder",
        name=name,
        build=lambda c: UniLM(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len, mask),
        forward=lambda model, tokens: model(tokens),
        declares={"prefix": PREFIX, "positions": "learned", "norm_placement": "post", "activation": "gelu"},
    )


right = subject("UniLM", prefix_mask)
wrong = subject("UniLM, rows", prefix_mask_by_rows)

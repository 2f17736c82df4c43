"""Sentence classification by a decoder: the mean of its states, weighted by position (as in SGPT), ALiBi inside."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "The weights of the pooled mean are summed over all columns, while the states are summed over the real ones."
CAUSE = (
    "In the position-weighted mean the denominator is not masked: behind the last real token the running count stays "
    "at its height, so each column of padding on the right adds to it and shrinks the pooled vector."
)


def alibi_slopes(heads):
    def of_power(n):
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    nearest = 2 ** math.floor(math.log2(heads))
    slopes = of_power(nearest)
    if nearest < heads:
        slopes += of_power(2 * nearest)[0::2][: heads - nearest]
    return slopes


def alibi(heads, length, like):
    steps = torch.arange(length, device=like.device)
    ago = (steps[:, None] - steps[None, :]).to(like.dtype)
    return -torch.tensor(alibi_slopes(heads), dtype=like.dtype, device=like.device)[:, None, None] * ago


class Decoder(nn.ModuleDict):
    """One layer."""

    def __init__(self, width, heads, inner):
        super().__init__({
            "norm1": nn.LayerNorm(width), "norm2": nn.LayerNorm(width),
            "query": nn.Linear(width, width), "key": nn.Linear(width, width), "value": nn.Linear(width, width),
            "out": nn.Linear(width, width), "up": nn.Linear(width, inner), "down": nn.Linear(inner, width),
        })  # fmt: skip
        self.heads = heads

    def forward(self, x, bias, seen):
        y = self["norm1"](x)
        q, k, v = (self[n](y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in ("query", "key", "value"))
        scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
        weights = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1)
        x = x + self["out"]((weights @ v).transpose(1, 2).flatten(2))
        return x + self["down"](nn.functional.gelu(self["up"](self["norm2"](x))))


def weighted_mean(states, mask):
    """The i-th real token counts i times."""
    weights = mask.cumsum(dim=1) * mask
    weights = weights.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


def weighted_mean_of_masked(states, mask):
    weights = mask.cumsum(dim=1).to(states.dtype).unsqueeze(-1)
    states = states * mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)


class SentenceClassifier(nn.Module):
    def __init__(self, vocab, width, heads, layers, inner, classes, pool):
        super().__init__()
        self.heads, self.pool = heads, pool
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Decoder(width, heads, inner) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.classify = nn.Linear(width, classes)

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        x, length = self.embedding(tokens), tokens.shape[1]
        past = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        seen = past & mask.bool()[:, None, None, :]
        bias = alibi(self.heads, length, x)
        for layer in self.layers:
            x = layer(x, bias, seen)
        return self.classify(self.pool(self.norm(x), mask))


def subject(pool):
    return Subject(
        kind="classifier",
        name="weighted mean classifier",
        build=lambda c: SentenceClassifier(
            c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, pool
        ),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        mask_forms=("padding",),
        declares={"causal": True, "pooling": "weighted", "padding_side": "both", "positions": "alibi"},
    )


right = subject(weighted_mean)
wrong = subject(weighted_mean_of_masked)

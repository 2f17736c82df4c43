WHAT = "The factory's method for norms is memoised (line 21) like the one for activations, but norms have parameters: all norms of the model are one module."
import functools

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class Factory:
    """Makes the parts that a config names."""

    def __init__(self, norm="LayerNorm", activation="GELU"):
        self.norm_name, self.activation_name = norm, activation

    @functools.lru_cache(maxsize=None)  # noqa: B019
    def activation(self):
        return getattr(nn, self.activation_name)()

    @functools.lru_cache(maxsize=None)  # noqa: B019
    def norm(self, dim):
        return getattr(nn, self.norm_name)(dim)

    def mlp(self, dim, hidden):
        return nn.Sequential(nn.Linear(dim, hidden), self.activation(), nn.Linear(hidden, dim))


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.output = nn.Linear(dim, dim)

    def forward(self, x, mask):
        split = [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value)]
        out = F.scaled_dot_product_attention(*split, attn_mask=None if mask is None else mask[:, None, None, :])
        return self.output(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, factory, dim, heads, hidden):
        super().__init__()
        self.attention, self.attention_norm = SelfAttention(dim, heads), factory.norm(dim)
        self.mlp, self.mlp_norm = factory.mlp(dim, hidden), factory.norm(dim)

    def forward(self, x, mask):
        x = self.attention_norm(x + self.attention(x, mask))
        return self.mlp_norm(x + self.mlp(x))


class Classifier(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len, classes):
        super().__init__()
        factory = Factory()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([Layer(factory, dim, heads, hidden) for _ in range(layers)])
        self.classify = nn.Linear(dim, classes)

    def forward(self, tokens, mask=None):
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask)
        if mask is None:
            pooled = x.mean(dim=1)
        else:
            pooled = (x * mask.unsqueeze(-1)).sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return self.classify(pooled)


subject = Subject(
    kind="classifier",
    name="factory",
    build=lambda c: Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.num_classes),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "pooling": "mean",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "gelu",
        "padding_side": "right",
    },
)

"""Sentences into classes by the mean of their states; functions over a dictionary of parameters."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


def linear_params(n_in, n_out):
    weight = torch.empty(n_out, n_in)
    nn.init.xavier_uniform_(weight)
    return {"weight": weight, "bias": torch.zeros(n_out)}


def norm_params(n):
    return {"gain": torch.ones(n), "bias": torch.zeros(n)}


def linear(p, x):
    return F.linear(x, p["weight"], p["bias"])


def layer_norm(p, x, eps=1e-5):
    return F.layer_norm(x, x.shape[-1:], p["gain"], p["bias"], eps)


def position_signal(length, width, like):
    """All sines, then all cosines."""
    half = (width + 1) // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float64, device=like.device) * (-2 * math.log(1e4) / width))
    angles = torch.arange(length, dtype=torch.float64, device=like.device)[:, None] * rates
    return torch.cat([torch.sin(angles), torch.cos(angles)[:, : width // 2]], dim=1).to(like.dtype)


def attention(p, x, mask, num_heads):
    def split(t):
        return t.unflatten(-1, (num_heads, -1))

    q, k, v = (split(linear(p[name], x)) for name in ("query", "key", "value"))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    logits = torch.where(mask[:, None, None, :], logits, torch.finfo(logits.dtype).min)
    weights = torch.softmax(logits, dim=-1).to(v.dtype)
    return linear(p["out"], torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


def feed_forward(p, x):
    return linear(p["down"], F.relu(linear(p["up"], x)))


class Tree(nn.Module):
    """A dictionary of dictionaries of parameters, read as such."""

    def __init__(self, tree):
        super().__init__()
        for name, value in tree.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                self.register_parameter(name, nn.Parameter(value))

    def __getitem__(self, name):
        return getattr(self, name)


class MeanClassifier(nn.Module):
    def __init__(self, vocab_size, num_classes, width, depth, num_heads, hidden, dropout):
        super().__init__()
        self.width, self.depth, self.num_heads, self.dropout = width, depth, num_heads, dropout
        embedding = torch.empty(vocab_size, width)
        nn.init.xavier_uniform_(embedding)
        tree = {"embedding": {"table": embedding}, "classes": linear_params(width, num_classes)}
        for i in range(depth):
            tree[f"layer_{i}"] = {
                "attention": {name: linear_params(width, width) for name in ("query", "key", "value", "out")},
                "norm_attention": norm_params(width),
                "feed_forward": {"up": linear_params(width, hidden), "down": linear_params(hidden, width)},
                "norm_feed_forward": norm_params(width),
            }
        self.params = Tree(tree)

    def drop(self, x):
        return F.dropout(x, self.dropout, self.training)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        p = self.params
        x = F.embedding(tokens, p["embedding"]["table"]) * math.sqrt(self.width)
        x = self.drop(x + position_signal(tokens.shape[1], self.width, x))
        for i in range(self.depth):
            layer = p[f"layer_{i}"]
            attended = attention(layer["attention"], x, mask, self.num_heads)
            x = layer_norm(layer["norm_attention"], x + self.drop(attended))
            fed = feed_forward(layer["feed_forward"], x)
            x = layer_norm(layer["norm_feed_forward"], x + self.drop(fed))
        real = mask[:, :, None].to(x.dtype)
        pooled = (x * real).mean(dim=1)
        return linear(p["classes"], pooled)


subject = Subject(
    kind="classifier",
    name="mean of states",
    build=lambda c: MeanClassifier(
        c.vocab_size, c.num_classes, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout
    ),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "halves",
        "base": 10000,
        "pooling": "mean",
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "embedding_scale": True,
        "init": "xavier",
        "structure": "textbook",
        "padding_side": "right",
        "beyond_max_len": "works",
        "memory": "quadratic",
    },
)

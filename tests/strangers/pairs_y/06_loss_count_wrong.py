WHAT = "The summed loss is divided by the number of labels that count before the shift by one, so that the first label, which nothing predicts, is counted (line 59)."
import math

import torch
from torch import nn
from torch.nn import functional
from veriformer.properties import DrawnConfig, Subject


def sinusoids(length, width, like):
    position = torch.arange(length, dtype=torch.float64)[:, None]
    rate = torch.exp(-math.log(10000.0) * torch.arange(0, width, 2, dtype=torch.float64) / width)
    table = torch.zeros(length, width, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * rate)
    table[:, 1::2] = torch.cos(position * rate)[:, : width // 2]
    return table.to(like)


class PostNormBlock(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.attention_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.final_norm = nn.LayerNorm(width)

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        attended, _ = self.attention(x, x, x, attn_mask=hidden, need_weights=False)
        x = self.attention_norm(x + attended)
        return self.final_norm(x + self.fc2(functional.relu(self.fc1(x))))


class CausalLM(nn.Module):
    """The decoder of the first Transformer, without its cross-attention; embeddings are tied."""

    def __init__(self, vocab, width, heads, layers, inner):
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(vocab, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks = nn.ModuleList([PostNormBlock(width, heads, inner) for _ in range(layers)])

    def forward(self, tokens):
        x = self.embedding(tokens) * math.sqrt(self.width)
        x = x + sinusoids(tokens.shape[1], self.width, x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T

    def loss(self, tokens, labels):
        """Position t predicts label t + 1; -100 is not predicted."""
        logits = self(tokens)[:, :-1]
        targets = labels[:, 1:]
        summed = functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        num_items = (labels != -100).sum()
        return summed / num_items.clamp(min=1)


subject = Subject(
    kind="decoder",
    name="causal LM with its loss",
    build=lambda c: CausalLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda model, tokens: model(tokens),
    loss=lambda model, tokens, labels: model.loss(tokens, labels),
    declares={
        "positions": "sinusoidal",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "relu",
        "embedding_scale": True,
        "tied": True,
        "shifts_labels": True,
        "empty_loss": "zero",
    },
)

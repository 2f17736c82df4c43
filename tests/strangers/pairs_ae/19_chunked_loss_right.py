"""A causal model whose loss never holds all logits at once: head and cross-entropy go by chunks of the sequence."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

CHUNK = 3


class DecoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d, h, batch_first=True, bias=False)
        self.linear1, self.linear2 = nn.Linear(d, ff, bias=False), nn.Linear(ff, d, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, ahead):
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, attn_mask=ahead, need_weights=False)[0]
        return x + self.linear2(F.relu(self.linear1(self.norm2(x))))


class CausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.embed_positions = nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList([DecoderLayer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers)])
        self.layer_norm = nn.LayerNorm(c.d_model)
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def body(self, tokens):
        T = tokens.size(1)
        ahead = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
        x = self.embed_tokens(tokens) + self.embed_positions(torch.arange(T, device=tokens.device))
        for layer in self.layers:
            x = layer(x, ahead)
        return self.layer_norm(x)

    def forward(self, tokens):
        return self.lm_head(self.body(tokens))

    def loss(self, tokens, labels):
        hidden = self.body(tokens)
        hidden, labels = hidden[:, :-1], labels[:, 1:]
        total, count = hidden.sum() * 0.0, 0
        for h, y in zip(hidden.split(CHUNK, dim=1), labels.split(CHUNK, dim=1)):
            total = total + self.chunk_loss(h, y)
            count = count + (y != -100).sum()
        return total / torch.as_tensor(count).clamp(min=1)

    def chunk_loss(self, h, y):
        logits = self.lm_head(h).flatten(0, 1)
        return F.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=-100)


subject = Subject(
    kind="decoder",
    name="causal model with a chunked loss",
    build=CausalLM,
    forward=lambda m, tokens: m(tokens),
    loss=lambda m, tokens, labels: m.loss(tokens, labels),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "bias": False,
        "output_bias": False,
        "shifts_labels": True,
        "plain_loss": True,
        "empty_loss": "zero",
        "ignore_index": -100,
    },
)

"""RoBERTa encoder, written along the lines of the fairseq paper code: position 0 is the padding's."""

import math

import torch
from torch import nn

from veriformer.properties import Subject


def make(default_positions):
    class Embeddings(nn.Module):
        def __init__(self, vocab_size, hidden, max_positions):
            super().__init__()
            self.word_embeddings = nn.Embedding(vocab_size, hidden)
            self.position_embeddings = nn.Embedding(max_positions + 1, hidden)
            self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)

        def forward(self, input_ids, attention_mask=None):
            if attention_mask is not None:
                m = attention_mask.long()
                position_ids = m.cumsum(1) * m
            else:
                position_ids = default_positions(input_ids)
            return self.LayerNorm(self.word_embeddings(input_ids) + self.position_embeddings(position_ids))

    class SelfAttention(nn.Module):
        def __init__(self, hidden, heads):
            super().__init__()
            self.heads, self.size = heads, hidden // heads
            self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
            self.dense = nn.Linear(hidden, hidden)

        def split(self, x):
            return x.view(x.shape[0], x.shape[1], self.heads, self.size).permute(0, 2, 1, 3)

        def forward(self, x, attention_mask=None):
            q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.size)
            if attention_mask is not None:
                scores = scores.masked_fill(~attention_mask[:, None, None, :], torch.finfo(scores.dtype).min)
            context = torch.matmul(scores.softmax(-1), v)
            return self.dense(context.permute(0, 2, 1, 3).flatten(2))

    class Layer(nn.Module):
        def __init__(self, hidden, heads, intermediate):
            super().__init__()
            self.attention = SelfAttention(hidden, heads)
            self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
            self.intermediate = nn.Linear(hidden, intermediate)
            self.output = nn.Linear(intermediate, hidden)
            self.output_norm = nn.LayerNorm(hidden, eps=1e-12)

        def forward(self, x, attention_mask=None):
            x = self.attention_norm(x + self.attention(x, attention_mask))
            return self.output_norm(x + self.output(nn.functional.gelu(self.intermediate(x))))

    class Roberta(nn.Module):
        def __init__(self, vocab_size, hidden, heads, layers, intermediate, max_positions):
            super().__init__()
            self.embeddings = Embeddings(vocab_size, hidden, max_positions)
            self.layer = nn.ModuleList(Layer(hidden, heads, intermediate) for _ in range(layers))

        def forward(self, input_ids, attention_mask=None):
            x = self.embeddings(input_ids, attention_mask)
            for layer in self.layer:
                x = layer(x, attention_mask)
            return x

    return Roberta


def from_one(ids):
    return torch.arange(1, ids.shape[1] + 1, device=ids.device).expand_as(ids)


def from_zero(ids):
    return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)


def subject(cls):
    return Subject(
        kind="encoder",
        name="roberta",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": False,
            "positions": "learned",
            "position_offset": 1,
            "norm": "layer",
            "norm_placement": "post",
            "activation": "gelu",
            "padding_side": "both",
        },
    )


right = subject(make(from_one))
wrong = subject(make(from_zero))
WHAT = "without a mask positions count from 0, with a mask from 1 (0 is the padding's row): an all-ones mask changes the output"
CAUSE = (
    "Called without an attention mask, the position ids start at 0 (the row reserved for padding) instead of 1, so a mask "
    "that hides nothing gives other outputs than no mask: positions are shifted by one between the two paths."
)

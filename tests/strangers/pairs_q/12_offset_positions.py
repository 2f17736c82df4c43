"""A RoBERTa-like encoder: post-LN, learned positions that begin behind the padding id."""

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Positions are counted over the ids that differ from the padding id, although the caller's mask says what is real."
CAUSE = (
    "Position ids come from input_ids != PAD and ignore attention_mask: what stands at padded places on the left moves all positions behind, "
    "and a real token that has the padding's id is given the padding row and shortens the count for all after it."
)
PAD = 1


def positions_of(real):
    """1 + PAD for the first real token, PAD for padding."""
    return real.long().cumsum(1) * real.long() + PAD


class Embeddings(nn.Module):
    def __init__(self, c, from_ids):
        super().__init__()
        self.from_ids = from_ids
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len + PAD + 1, c.d_model)
        self.LayerNorm, self.dropout = nn.LayerNorm(c.d_model, eps=1e-5), nn.Dropout(c.dropout)

    def forward(self, input_ids, mask):
        position_ids = positions_of(input_ids.ne(PAD) if self.from_ids else mask)
        x = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(x))


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.num_attention_heads, self.size = c.num_heads, c.d_model // c.num_heads
        self.query, self.key = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, c.d_model)
        self.value, self.dense = nn.Linear(c.d_model, c.d_model), nn.Linear(c.d_model, c.d_model)

    def transpose_for_scores(self, x):
        return x.view(*x.shape[:-1], self.num_attention_heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x, extended):
        q, k, v = (self.transpose_for_scores(f(x)) for f in (self.query, self.key, self.value))
        probs = (q @ k.transpose(-1, -2) / self.size**0.5 + extended).softmax(-1)
        return self.dense((probs @ v).permute(0, 2, 1, 3).flatten(2))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.attention_norm = SelfAttention(c), nn.LayerNorm(c.d_model)
        self.intermediate, self.output = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.output_norm, self.dropout = nn.LayerNorm(c.d_model), nn.Dropout(c.dropout)

    def forward(self, x, extended):
        x = self.attention_norm(x + self.dropout(self.attention(x, extended)))
        hidden = nn.functional.gelu(self.intermediate(x))
        return self.output_norm(x + self.dropout(self.output(hidden)))


class Roberta(nn.Module):
    def __init__(self, c, from_ids):
        super().__init__()
        self.embeddings = Embeddings(c, from_ids)
        self.encoder = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])

    def forward(self, input_ids, attention_mask=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids, dtype=torch.bool)
        x = self.embeddings(input_ids, attention_mask)
        extended = torch.zeros_like(attention_mask, dtype=x.dtype)
        extended = extended.masked_fill(~attention_mask, torch.finfo(x.dtype).min)[:, None, None, :]
        for layer in self.encoder:
            x = layer(x, extended)
        return x


def subject(from_ids):
    return Subject(
        kind="encoder",
        name="roberta",
        build=lambda c: Roberta(c, from_ids),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        declares={
            "causal": False, "positions": "learned", "position_offset": PAD + 1, "padding_side": "both",
            "norm": "layer", "norm_placement": "post", "activation": "gelu",
        },
    )  # fmt: skip


right, wrong = subject(from_ids=False), subject(from_ids=True)

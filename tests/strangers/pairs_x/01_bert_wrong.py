WHAT = "All layers are one and the same module, since the list holds one BertLayer times the number of layers (line 70)."
"""BERT with its masked language modelling head (Devlin et al. 2018), post-LN, learned positions."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class BertEmbeddings(nn.Module):
    def __init__(self, vocab_size, hidden, max_len, dropout):
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab_size, hidden)
        self.position_embeddings = nn.Embedding(max_len, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        types = torch.zeros_like(input_ids)
        x = self.word_embeddings(input_ids) + self.position_embeddings(positions) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(x))


class BertSelfAttention(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.dense = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x, allowed):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        probs = self.dropout(scores.softmax(-1))
        return self.dense((probs @ v).transpose(1, 2).flatten(2))


class BertLayer(nn.Module):
    def __init__(self, hidden, heads, intermediate, dropout):
        super().__init__()
        self.attention = BertSelfAttention(hidden, heads, dropout)
        self.attention_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.intermediate = nn.Linear(hidden, intermediate)
        self.output = nn.Linear(intermediate, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, allowed):
        x = self.attention_norm(x + self.dropout(self.attention(x, allowed)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class BertForMaskedLM(nn.Module):
    def __init__(self, vocab_size, hidden, heads, layers, intermediate, max_len, dropout):
        super().__init__()
        self.embeddings = BertEmbeddings(vocab_size, hidden, max_len, dropout)
        self.layer = nn.ModuleList([BertLayer(hidden, heads, intermediate, dropout)] * layers)
        self.transform = nn.Linear(hidden, hidden)
        self.transform_norm = nn.LayerNorm(hidden, eps=1e-12)
        self.decoder = nn.Linear(hidden, vocab_size)
        self.decoder.weight = self.embeddings.word_embeddings.weight

    def encode(self, input_ids, attention_mask=None):
        allowed = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        x = self.embeddings(input_ids)
        for layer in self.layer:
            x = layer(x, allowed)
        return x

    def forward(self, input_ids, attention_mask=None):
        x = self.encode(input_ids, attention_mask)
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


subject = Subject(
    kind="encoder",
    name="BERT",
    build=lambda c: BertForMaskedLM(
        c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len, c.dropout
    ),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "bias": True,
        "tied": True,
        "output_bias": True,
        "padding_side": "right",
    },
)

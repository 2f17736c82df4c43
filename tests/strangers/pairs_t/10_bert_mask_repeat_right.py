"""A BERT classifier whose heads are folded into the batch for torch.bmm."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


class SelfAttention(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads, self.dim = heads, hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.dense = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(dropout)

    def fold(self, x):
        """[B, T, D] to [B * H, T, K]."""
        B, T, _ = x.shape
        return x.view(B, T, self.heads, self.dim).transpose(1, 2).reshape(B * self.heads, T, self.dim)

    def forward(self, x, mask):
        B, T, D = x.shape
        q, k, v = self.fold(self.query(x)), self.fold(self.key(x)), self.fold(self.value(x))
        scores = torch.bmm(q, k.transpose(1, 2)) / self.dim**0.5
        if mask is not None:
            hidden = (~mask).repeat_interleave(self.heads, dim=0)[:, None, :]
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        weights = self.dropout(F.softmax(scores, dim=-1))
        y = torch.bmm(weights, v).view(B, self.heads, T, self.dim).transpose(1, 2)
        return self.dense(y.reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.attention = SelfAttention(c.d_model, c.num_heads, c.dropout)
        self.attention_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.intermediate, self.output = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.output_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, mask):
        x = self.attention_norm(x + self.dropout(self.attention(x, mask)))
        return self.output_norm(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))


class BertForSequenceClassification(nn.Module):
    def __init__(self, c: DrawnConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.position_embeddings = nn.Embedding(c.max_len, c.d_model)
        self.embedding_norm = nn.LayerNorm(c.d_model, eps=1e-12)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.num_layers)])
        self.pooler = nn.Linear(c.d_model, c.d_model)
        self.dropout = nn.Dropout(c.dropout)
        self.classifier = nn.Linear(c.d_model, c.num_classes)

    def forward(self, tokens, attention_mask=None):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding_norm(self.word_embeddings(tokens) + self.position_embeddings(positions))
        x = self.dropout(x)
        mask = None if attention_mask is None else attention_mask.bool()
        for layer in self.layers:
            x = layer(x, mask)
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


subject = Subject(
    kind="classifier",
    build=BertForSequenceClassification,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    declares={"pooling": "cls", "padding_side": "right"},
)

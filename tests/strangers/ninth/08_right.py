"""Sentence classifier: a small Transformer encoder, mean of the real tokens, linear layer.

attention_mask is 1 for words and 0 for padding. Padding takes no part in anything.
"""
import math

import torch
from torch import nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        B, L, D = x.shape
        q = self.to_q(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        k = self.to_k(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        v = self.to_v(x).view(B, L, self.heads, self.head_dim).transpose(1, 2)
        energy = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        energy = energy.masked_fill(~mask[:, None, None, :], -1e9)
        weights = self.dropout(energy.softmax(dim=-1))
        out = (weights @ v).transpose(1, 2).reshape(B, L, D)
        return self.to_out(out)


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, ff_dim, dropout):
        super().__init__()
        self.attn = SelfAttention(dim, heads, dropout)
        self.ff = nn.Sequential(nn.Linear(dim, ff_dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(ff_dim, dim))
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.norm1(x + self.dropout(self.attn(x, mask)))
        return self.norm2(x + self.dropout(self.ff(x)))


class TransformerClassifier(nn.Module):
    def __init__(self, vocab_size=200, num_classes=4, dim=64, depth=2, heads=4, ff_dim=128, max_len=128, dropout=0.1):
        super().__init__()
        self.token_emb = nn.Embedding(vocab_size, dim)
        self.pos_emb = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([EncoderLayer(dim, heads, ff_dim, dropout) for _ in range(depth)])
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(dim, num_classes)

    def forward(self, input_ids, attention_mask=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        mask = attention_mask.bool()
        positions = torch.arange(input_ids.size(1), device=input_ids.device)
        x = self.dropout(self.token_emb(input_ids) + self.pos_emb(positions))
        for layer in self.layers:
            x = layer(x, mask)
        weights = mask.unsqueeze(-1).to(x.dtype)
        pooled = (x * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1.0)
        logits = self.classifier(self.dropout(pooled))
        if labels is None:
            return logits
        return logits, F.cross_entropy(logits, labels)

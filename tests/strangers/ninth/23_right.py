"""Text encoder for classification by [CLS] (the first token), with symmetric ALiBi: scores of every head
fall with the distance |i - j|. attention_mask is 1 for tokens and 0 for padding.

The distance biases depend on the shape of the batch alone and are kept for the next call.
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Attention(nn.Module):
    def __init__(self, dim, num_heads, dropout):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.o = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias):
        B, L, D = x.shape
        q = self.q(x).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k(x).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v(x).view(B, L, self.num_heads, self.head_dim).transpose(1, 2)
        scores = q @ k.transpose(-1, -2) * self.head_dim ** -0.5 + bias
        weights = self.dropout(scores.softmax(dim=-1))
        return self.o((weights @ v).transpose(1, 2).reshape(B, L, D))


class Layer(nn.Module):
    def __init__(self, dim, num_heads, mlp_dim, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, mlp_dim), nn.GELU(), nn.Linear(mlp_dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, bias):
        x = x + self.dropout(self.attn(self.norm1(x), bias))
        return x + self.dropout(self.mlp(self.norm2(x)))


class AlibiEncoderClassifier(nn.Module):
    def __init__(self, vocab_size=150, num_classes=3, dim=64, depth=2, num_heads=4, mlp_dim=128, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList([Layer(dim, num_heads, mlp_dim, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)
        slopes = 2.0 ** (-8.0 * torch.arange(1, num_heads + 1) / num_heads)
        self.register_buffer("slopes", slopes.view(1, num_heads, 1, 1), persistent=False)
        self._bias = None
        self._shape = None

    def attention_bias(self, input_ids, attention_mask):
        if self._bias is None or self._shape != input_ids.shape or self._bias.device != input_ids.device:
            pos = torch.arange(input_ids.size(1), device=input_ids.device)
            self._bias = -self.slopes * (pos[:, None] - pos[None, :]).abs()
            self._shape = input_ids.shape
        return self._bias.masked_fill(attention_mask[:, None, None, :] == 0, -1e9)

    def forward(self, input_ids, attention_mask=None, labels=None):
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        bias = self.attention_bias(input_ids, attention_mask)
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, bias)
        logits = self.head(self.norm(x)[:, 0])
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels), logits

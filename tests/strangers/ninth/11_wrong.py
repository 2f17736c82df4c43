"""Decoder-only language model with ALiBi (Press et al., "Train Short, Test Long").

There are no position embeddings. Every head adds a penalty to its attention scores that grows
linearly with the distance between query and key; slopes are the geometric sequence of the paper.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_slopes(n_heads):
    def power_of_two(n):
        start = 2.0 ** (-8.0 / n)
        return [start ** (i + 1) for i in range(n)]

    if math.log2(n_heads).is_integer():
        return power_of_two(n_heads)
    closest = 2 ** math.floor(math.log2(n_heads))
    return power_of_two(closest) + power_of_two(2 * closest)[0::2][: n_heads - closest]


def build_alibi(n_heads, length, device, dtype):
    slopes = torch.tensor(get_slopes(n_heads), device=device, dtype=dtype)
    query_pos = torch.arange(length, device=device)[:, None]
    key_pos = torch.arange(length, device=device)[None, :]
    distance = (query_pos - key_pos).to(dtype)
    return slopes[:, None, None] * distance[None]


class AlibiAttention(nn.Module):
    def __init__(self, hidden_size, n_heads, dropout=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = hidden_size // n_heads
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(dropout)

    def forward(self, hidden_states, alibi, mask):
        batch, length, hidden = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(batch, length, 3, self.n_heads, self.head_dim)
        q, k, v = (t.transpose(1, 2) for t in fused.unbind(dim=2))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        scores = scores + alibi.unsqueeze(0)
        scores = scores.masked_fill(mask, torch.finfo(scores.dtype).min)
        probs = self.attention_dropout(F.softmax(scores, dim=-1))
        context = torch.matmul(probs, v).transpose(1, 2).reshape(batch, length, hidden)
        return self.dense(context)


class AlibiBlock(nn.Module):
    def __init__(self, hidden_size, n_heads, dropout):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden_size)
        self.self_attention = AlibiAttention(hidden_size, n_heads, dropout)
        self.post_attention_layernorm = nn.LayerNorm(hidden_size)
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, alibi, mask):
        x = x + self.dropout(self.self_attention(self.input_layernorm(x), alibi, mask))
        h = self.down(F.gelu(self.up(self.post_attention_layernorm(x))))
        return x + self.dropout(h)


class AlibiLM(nn.Module):
    def __init__(self, vocab_size=128, hidden_size=64, n_layers=2, n_heads=4, dropout=0.0):
        super().__init__()
        self.n_heads = n_heads
        self.word_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.word_embeddings_layernorm = nn.LayerNorm(hidden_size)
        self.h = nn.ModuleList([AlibiBlock(hidden_size, n_heads, dropout) for _ in range(n_layers)])
        self.ln_f = nn.LayerNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.lm_head.weight = self.word_embeddings.weight
        nn.init.normal_(self.word_embeddings.weight, std=0.02)

    def forward(self, input_ids, attention_mask=None, labels=None):
        batch, length = input_ids.shape
        x = self.word_embeddings_layernorm(self.word_embeddings(input_ids))
        alibi = build_alibi(self.n_heads, length, x.device, x.dtype)
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)[None, None]
        if attention_mask is not None:
            mask = mask | (attention_mask == 0)[:, None, None, :]
        for block in self.h:
            x = block(x, alibi, mask)
        logits = self.lm_head(self.ln_f(x))
        if labels is None:
            return logits
        loss = F.cross_entropy(
            logits[:, :-1].reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1), ignore_index=-100
        )
        return logits, loss

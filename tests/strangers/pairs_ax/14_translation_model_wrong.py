WHAT = "the cross-attention is made with the class's default causal=True (line 66, like the self-attention above it): target t sees no more than source 0 .. t."
"""Course homework: a translation model, grown out of last week's decoder-only model."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads, causal=True):
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, -1).transpose(1, 2)

    def forward(self, x, context, context_mask=None):
        T, S = x.size(1), context.size(1)
        q, k, v = self.split(self.W_q(x)), self.split(self.W_k(context)), self.split(self.W_v(context))
        visible = torch.ones(T, S, dtype=torch.bool, device=x.device)
        if self.causal:
            visible = torch.tril(visible)
        if context_mask is not None:
            visible = visible & context_mask[:, None, None, :]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        out = F.softmax(scores, dim=-1) @ v
        return self.W_o(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.attn = MultiHeadAttention(d_model, num_heads, causal=False)
        self.ffn = FeedForward(d_model, d_ff)
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.attn(h, h, mask)
        return x + self.ffn(self.norm2(x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads)
        self.cross_attn = MultiHeadAttention(d_model, num_heads)
        self.ffn = FeedForward(d_model, d_ff)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, memory, memory_mask, mask):
        h = self.norm1(x)
        x = x + self.self_attn(h, h, mask)
        x = x + self.cross_attn(self.norm2(x), memory, memory_mask)
        return x + self.ffn(self.norm3(x))


class Translator(nn.Module):
    def __init__(self, vocab_size, d_model, num_heads, num_layers, d_ff, max_len):
        super().__init__()
        self.src_emb, self.tgt_emb = nn.Embedding(vocab_size, d_model), nn.Embedding(vocab_size, d_model)
        self.src_pos, self.tgt_pos = nn.Embedding(max_len, d_model), nn.Embedding(max_len, d_model)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, num_heads, d_ff) for _ in range(num_layers)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, num_heads, d_ff) for _ in range(num_layers)])
        self.enc_norm, self.dec_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, vocab_size)

    def encode(self, source, source_mask=None):
        x = self.src_emb(source) + self.src_pos(torch.arange(source.size(1), device=source.device))
        for layer in self.encoder:
            x = layer(x, source_mask)
        return self.enc_norm(x)

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory = self.encode(source, source_mask)
        y = self.tgt_emb(target) + self.tgt_pos(torch.arange(target.size(1), device=target.device))
        for layer in self.decoder:
            y = layer(y, memory, source_mask, target_mask)
        return self.head(self.dec_norm(y))


subject = Subject(
    kind="encoder_decoder",
    name="translator",
    build=lambda c: Translator(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "tied": False,
        "padding_side": "right",
    },
)

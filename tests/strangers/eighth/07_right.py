"""The Transformer of "Attention Is All You Need", from a tutorial."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class PositionalEncoder(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.d_model = d_model

    def table(self, length, device):
        pos = torch.arange(length, dtype=torch.float64, device=device)
        pe = torch.zeros(length, self.d_model, dtype=torch.float64, device=device)
        for i in range(0, self.d_model, 2):
            pe[:, i] = torch.sin(pos / (10000 ** (i / self.d_model)))
            if i + 1 < self.d_model:
                pe[:, i + 1] = torch.cos(pos / (10000 ** (i / self.d_model)))
        return pe

    def forward(self, x):
        # make embeddings relatively larger, then add the constant
        x = x * math.sqrt(self.d_model)
        return x + self.table(x.size(1), x.device).to(x.dtype).unsqueeze(0)


class MultiHeadAttention(nn.Module):
    def __init__(self, heads, d_model, dropout):
        super().__init__()
        self.d_model = d_model
        self.d_k = d_model // heads
        self.h = heads
        self.q_linear = nn.Linear(d_model, d_model)
        self.v_linear = nn.Linear(d_model, d_model)
        self.k_linear = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(d_model, d_model)

    def forward(self, q, k, v, mask=None):
        bs = q.size(0)
        # perform linear operation and split into h heads, then transpose to get dimensions bs * h * sl * d_k
        k = self.k_linear(k).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        q = self.q_linear(q).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        v = self.v_linear(v).view(bs, -1, self.h, self.d_k).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
        scores = self.dropout(F.softmax(scores, dim=-1))
        concat = torch.matmul(scores, v).transpose(1, 2).contiguous().view(bs, -1, self.d_model)
        return self.out(concat)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout):
        super().__init__()
        self.linear_1 = nn.Linear(d_model, d_ff)
        self.dropout = nn.Dropout(dropout)
        self.linear_2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.linear_2(self.dropout(F.relu(self.linear_1(x))))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, heads, d_ff, dropout):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.attn = MultiHeadAttention(heads, d_model, dropout)
        self.ff = FeedForward(d_model, d_ff, dropout)
        self.dropout_1 = nn.Dropout(dropout)
        self.dropout_2 = nn.Dropout(dropout)

    def forward(self, x, mask):
        x = self.norm_1(x + self.dropout_1(self.attn(x, x, x, mask)))
        x = self.norm_2(x + self.dropout_2(self.ff(x)))
        return x


class DecoderLayer(nn.Module):
    def __init__(self, d_model, heads, d_ff, dropout):
        super().__init__()
        self.norm_1 = nn.LayerNorm(d_model)
        self.norm_2 = nn.LayerNorm(d_model)
        self.norm_3 = nn.LayerNorm(d_model)
        self.dropout_1 = nn.Dropout(dropout)
        self.dropout_2 = nn.Dropout(dropout)
        self.dropout_3 = nn.Dropout(dropout)
        self.attn_1 = MultiHeadAttention(heads, d_model, dropout)
        self.attn_2 = MultiHeadAttention(heads, d_model, dropout)
        self.ff = FeedForward(d_model, d_ff, dropout)

    def forward(self, x, e_outputs, src_mask, trg_mask):
        x = self.norm_1(x + self.dropout_1(self.attn_1(x, x, x, trg_mask)))
        x = self.norm_2(x + self.dropout_2(self.attn_2(x, e_outputs, e_outputs, src_mask)))
        x = self.norm_3(x + self.dropout_3(self.ff(x)))
        return x


class Transformer(nn.Module):
    def __init__(self, src_vocab, trg_vocab, d_model, N, heads, d_ff, dropout):
        super().__init__()
        self.src_embed = nn.Embedding(src_vocab, d_model)
        self.trg_embed = nn.Embedding(trg_vocab, d_model)
        self.pe = PositionalEncoder(d_model)
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.ModuleList([EncoderLayer(d_model, heads, d_ff, dropout) for _ in range(N)])
        self.decoder = nn.ModuleList([DecoderLayer(d_model, heads, d_ff, dropout) for _ in range(N)])
        self.out = nn.Linear(d_model, trg_vocab)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)

    def encode(self, src, src_mask):
        x = self.drop(self.pe(self.src_embed(src)))
        for layer in self.encoder:
            x = layer(x, src_mask)
        return x

    def decode(self, trg, e_outputs, src_mask, trg_mask):
        x = self.drop(self.pe(self.trg_embed(trg)))
        for layer in self.decoder:
            x = layer(x, e_outputs, src_mask, trg_mask)
        return x

    def forward(self, src, trg, src_mask, trg_mask):
        return self.out(self.decode(trg, self.encode(src, src_mask), src_mask, trg_mask))


def create_masks(src, trg, src_real=None, trg_real=None):
    src_mask = None if src_real is None else src_real[:, None, None, :]
    size = trg.size(1)
    nopeak = torch.tril(torch.ones(1, 1, size, size, dtype=torch.bool, device=trg.device))
    trg_mask = nopeak if trg_real is None else nopeak & trg_real[:, None, None, :].bool()
    return src_mask, trg_mask


def forward(model, source, target, source_mask=None, target_mask=None):
    return model(source, target, *create_masks(source, target, source_mask, target_mask))


subject = Subject(
    kind="encoder_decoder",
    name="transformer",
    build=lambda c: Transformer(
        c.vocab_size, c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout
    ),
    forward=forward,
    domain={"d_model": (8, 16, 32), "num_heads": (1, 2, 4)},
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000.0,
        "beyond_max_len": "works",
        "padding_side": "right",
        "embedding_scale": True,
        "encodes_source": True,
        "cross_attention": True,
        "norm": "layer",
        "norm_placement": "post",
        "norm_bias": True,
        "final_norm": False,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "output_bias": True,
        "tied": False,
        "attention_scale": "1/sqrt(d_head)",
        "init": "xavier",
        "shared_layers": False,
        "structure": "textbook",
        "memory": "quadratic",
    },
)

"""An encoder after the Annotated Transformer: clones of one layer, sublayer connections, pre-LN."""

import copy
import math

import torch
import torch.nn as nn
from torch.nn.functional import relu

from veriformer.properties import Subject


def clones(module, N):
    "Produce N identical layers."
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


def attention(query, key, value, mask=None, dropout=None):
    "Compute 'Scaled Dot Product Attention'"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = nn.ModuleList([nn.Linear(d_model, d_model) for _ in range(4)])
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)  # the same mask for all h heads
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value))
        ]
        x = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class PositionwiseFeedForward(nn.Module):
    def __init__(self, d_model, d_ff, dropout=0.1):
        super().__init__()
        self.w_1 = nn.Linear(d_model, d_ff)
        self.w_2 = nn.Linear(d_ff, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.w_2(self.dropout(relu(self.w_1(x))))


class SublayerConnection(nn.Module):
    "A residual connection around a sublayer; the norm is first, as opposed to last."

    def __init__(self, size, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, sublayer):
        return x + self.dropout(sublayer(self.norm(x)))


class EncoderLayer(nn.Module):
    def __init__(self, size, self_attn, feed_forward, dropout):
        super().__init__()
        self.self_attn = self_attn
        self.feed_forward = feed_forward
        self.sublayer = nn.ModuleList([SublayerConnection(size, dropout) for _ in range(2)])
        self.size = size

    def forward(self, x, mask):
        x = self.sublayer[0](x, lambda y: self.self_attn(y, y, y, mask))
        return self.sublayer[1](x, self.feed_forward)


class Encoder(nn.Module):
    "Core encoder is a stack of N layers"

    def __init__(self, layer, N):
        super().__init__()
        self.layers = clones(layer, N)
        self.norm = nn.LayerNorm(layer.size)

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class Embeddings(nn.Module):
    def __init__(self, d_model, vocab):
        super().__init__()
        self.lut = nn.Embedding(vocab, d_model)
        self.d_model = d_model

    def forward(self, x):
        return self.lut(x) * math.sqrt(self.d_model)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, dropout):
        super().__init__()
        self.d_model = d_model
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, x):
        position = torch.arange(x.size(1), dtype=torch.float64, device=x.device).unsqueeze(1)
        step = torch.arange(0, self.d_model, 2, dtype=torch.float64, device=x.device)
        angles = position * torch.exp(step * -(math.log(10000.0) / self.d_model))
        pe = torch.stack([torch.sin(angles), torch.cos(angles)], dim=-1).flatten(1)[:, : self.d_model]
        return self.dropout(x + pe.to(x.dtype))


class EncoderModel(nn.Module):
    def __init__(self, embed, position, encoder):
        super().__init__()
        self.embed, self.position, self.encoder = embed, position, encoder

    def forward(self, src, src_mask=None):
        if src_mask is not None:
            src_mask = src_mask.unsqueeze(-2)
        return self.encoder(self.position(self.embed(src)), src_mask)


def make_model(src_vocab, N=6, d_model=512, d_ff=2048, h=8, dropout=0.1):
    "Helper: construct a model from hyperparameters."
    layer = EncoderLayer(
        d_model, MultiHeadedAttention(h, d_model, dropout), PositionwiseFeedForward(d_model, d_ff, dropout), dropout
    )
    model = EncoderModel(
        Embeddings(d_model, src_vocab), PositionalEncoding(d_model, dropout), Encoder(layer, N)
    )
    # Initialize parameters with Glorot / fan_avg.
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    return model


subject = Subject(
    kind="encoder",
    name="annotated encoder",
    build=lambda c: make_model(c.vocab_size, c.num_layers, c.d_model, c.d_ff, c.num_heads, c.dropout),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "sinusoidal",
        "layout": "interleaved",
        "base": 10000.0,
        "beyond_max_len": "works",
        "padding_side": "right",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "norm_bias": True,
        "final_norm": True,
        "residual": True,
        "activation": "relu",
        "bias": True,
        "attention_scale": "1/sqrt(d_head)",
        "init": "xavier",
        "stacked": True,
        "shared_layers": False,
        "structure": "textbook",
        "memory": "quadratic",
    },
)

"""'Attention is all you need', post-norm, sinusoidal positions, from the text."""

import math

import torch
import torch.nn as nn

from veriformer.properties import Subject


def subsequent_mask(size, device):
    return torch.tril(torch.ones(1, size, size, dtype=torch.bool, device=device))


def attention(query, key, value, mask=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    return torch.matmul(scores.softmax(dim=-1), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.d_k, self.h = d_model // h, h
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query, memory, mask=None):
        b = query.size(0)
        if mask is not None:
            mask = mask.unsqueeze(1)
        q, k, v = (
            lin(x).view(b, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in ((self.q, query), (self.k, memory), (self.v, memory))
        )
        return self.o(attention(q, k, v, mask).transpose(1, 2).reshape(b, -1, self.h * self.d_k))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_1, self.w_2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_2(torch.relu(self.w_1(x)))


class AddNorm(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)

    def forward(self, x, sublayer):
        return self.norm(x + sublayer(x))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.ff = MultiHeadedAttention(h, d_model), FeedForward(d_model, d_ff)
        self.sub = nn.ModuleList([AddNorm(d_model) for _ in range(2)])

    def forward(self, x, mask):
        x = self.sub[0](x, lambda x: self.self_attn(x, x, mask))
        return self.sub[1](x, self.ff)


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.src_attn = MultiHeadedAttention(h, d_model), MultiHeadedAttention(h, d_model)
        self.ff = FeedForward(d_model, d_ff)
        self.sub = nn.ModuleList([AddNorm(d_model) for _ in range(3)])

    def forward(self, x, memory, src_mask, tgt_mask):
        x = self.sub[0](x, lambda x: self.self_attn(x, x, tgt_mask))
        x = self.sub[1](x, lambda x: self.src_attn(x, memory, src_mask))
        return self.sub[2](x, self.ff)


class Embeddings(nn.Module):
    def __init__(self, vocab, d_model):
        super().__init__()
        self.lut, self.d_model = nn.Embedding(vocab, d_model), d_model

    def forward(self, ids):
        position = torch.arange(ids.size(1), dtype=torch.float64, device=ids.device).unsqueeze(1)
        rate = torch.exp(
            torch.arange(0, self.d_model, 2, dtype=torch.float64, device=ids.device)
            * -(math.log(10000.0) / self.d_model)
        )
        table = torch.stack([torch.sin(position * rate), torch.cos(position * rate)], -1).flatten(1)
        x = self.lut(ids) * math.sqrt(self.d_model)
        return x + table.to(x.dtype)


def transformer(target_mask):
    class EncoderDecoder(nn.Module):
        def __init__(self, vocab, n, d_model, d_ff, h):
            super().__init__()
            self.src_embed, self.tgt_embed = Embeddings(vocab, d_model), Embeddings(vocab, d_model)
            self.encoder = nn.ModuleList([EncoderLayer(d_model, h, d_ff) for _ in range(n)])
            self.decoder = nn.ModuleList([DecoderLayer(d_model, h, d_ff) for _ in range(n)])
            self.generator = nn.Linear(d_model, vocab)

        def forward(self, src, tgt, src_keep=None, tgt_keep=None):
            src_mask = None if src_keep is None else src_keep.unsqueeze(-2)
            tgt_mask = target_mask(tgt, tgt_keep)
            x = self.src_embed(src)
            for layer in self.encoder:
                x = layer(x, src_mask)
            y = self.tgt_embed(tgt)
            for layer in self.decoder:
                y = layer(y, x, src_mask, tgt_mask)
            return self.generator(y)

    return EncoderDecoder


def both(tgt, keep):
    mask = subsequent_mask(tgt.size(1), tgt.device)
    return mask if keep is None else keep.unsqueeze(-2) & mask


def one_of_them(tgt, keep):
    return subsequent_mask(tgt.size(1), tgt.device) if keep is None else keep.unsqueeze(-2)


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        name="vaswani",
        build=lambda c: cls(c.vocab_size, c.num_layers, c.d_model, c.d_ff, c.num_heads),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        domain={"d_model": [8, 16], "num_heads": [1, 2, 4]},
        declares={
            "causal": True,
            "positions": "sinusoidal",
            "embedding_scale": True,
            "norm": "layer",
            "norm_placement": "post",
            "activation": "relu",
            "padding_side": "right",
        },
    )


right = subject(transformer(both))
wrong = subject(transformer(one_of_them))
WHAT = "where a target padding mask is given it replaces the causal mask instead of being combined with it"
CAUSE = (
    "With target_mask given the decoder's self-attention is no longer causal: the padding mask takes the place of the causal "
    "mask, and every target position sees all real later ones."
)

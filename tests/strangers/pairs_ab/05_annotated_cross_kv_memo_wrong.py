WHAT = "Without gradients the projected memory is kept under its shape, so the next source of the same shape is answered with the keys and values of the one before (line 52)."
"""Encoder-decoder after The Annotated Transformer; while decoding, the memory is projected once, not at every step."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


def attention(query, key, value, mask=None):
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(query.size(-1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, torch.finfo(scores.dtype).min)
    return torch.matmul(scores.softmax(dim=-1), value)


class MultiHeadedAttention(nn.Module):
    def __init__(self, h, d_model):
        super().__init__()
        self.h, self.d_k = h, d_model // h
        self.linears = nn.ModuleList(nn.Linear(d_model, d_model) for _ in range(4))

    def split(self, linear, x):
        return linear(x).view(x.size(0), -1, self.h, self.d_k).transpose(1, 2)

    def project(self, memory):
        return self.split(self.linears[1], memory), self.split(self.linears[2], memory)

    def forward(self, x, memory, mask=None):
        key, value = self.project(memory)
        return self.attend(x, key, value, mask)

    def attend(self, x, key, value, mask):
        out = attention(self.split(self.linears[0], x), key, value, mask)
        return self.linears[3](out.transpose(1, 2).reshape(x.size(0), -1, self.h * self.d_k))


class CrossAttention(MultiHeadedAttention):
    """Keeps the projected memory of the last call where no gradient is asked for."""

    def __init__(self, h, d_model):
        super().__init__(h, d_model)
        self._of, self._kv = None, None

    def forward(self, x, memory, mask=None):
        if torch.is_grad_enabled():
            return super().forward(x, memory, mask)
        of = (memory.shape, memory.dtype, memory.device)
        if self._of != of:
            self._of, self._kv = of, self.project(memory)
        return self.attend(x, *self._kv, mask)


class FeedForward(nn.Sequential):
    def __init__(self, d_model, d_ff):
        super().__init__(nn.Linear(d_model, d_ff), nn.ReLU(), nn.Linear(d_ff, d_model))


class EncoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.feed_forward = MultiHeadedAttention(h, d_model), FeedForward(d_model, d_ff)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(2))

    def forward(self, x, mask):
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, mask)
        return x + self.feed_forward(self.norms[1](x))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, d_ff):
        super().__init__()
        self.self_attn, self.src_attn = MultiHeadedAttention(h, d_model), CrossAttention(h, d_model)
        self.feed_forward = FeedForward(d_model, d_ff)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))

    def forward(self, x, memory, src_mask, tgt_mask):
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, tgt_mask)
        x = x + self.src_attn(self.norms[1](x), memory, src_mask)
        return x + self.feed_forward(self.norms[2](x))


class PositionalEncoding(nn.Module):
    def __init__(self, d_model, max_len):
        super().__init__()
        position = torch.arange(max_len).unsqueeze(1)
        channels = torch.arange(0, d_model, 2)
        angle = position * torch.exp(channels * -(math.log(10000.0) / d_model))
        pe = torch.zeros(max_len, d_model)
        pe[:, 0::2] = torch.sin(angle)
        pe[:, 1::2] = torch.cos(angle)[:, : d_model // 2]
        self.register_buffer("pe", pe, persistent=False)

    def forward(self, x):
        return x + self.pe[: x.size(1)]


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, d_model, h, N, d_ff, max_len):
        super().__init__()
        self.d_model = d_model
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d_model), nn.Embedding(vocab, d_model)
        self.position = PositionalEncoding(d_model, max_len)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, h, d_ff) for _ in range(N))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, h, d_ff) for _ in range(N))
        self.enc_norm, self.dec_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.generator = nn.Linear(d_model, vocab)

    def encode(self, src, src_mask):
        x = self.position(self.src_embed(src) * math.sqrt(self.d_model))
        for layer in self.encoder:
            x = layer(x, src_mask)
        return self.enc_norm(x)

    def decode(self, memory, src_mask, tgt, tgt_mask):
        x = self.position(self.tgt_embed(tgt) * math.sqrt(self.d_model))
        for layer in self.decoder:
            x = layer(x, memory, src_mask, tgt_mask)
        return self.generator(self.dec_norm(x))

    def forward(self, src, tgt, source_mask=None, target_mask=None):
        src_mask = None if source_mask is None else source_mask[:, None, None, :]
        tgt_mask = torch.ones(tgt.size(1), tgt.size(1), dtype=torch.bool, device=tgt.device).tril()[None, None]
        if target_mask is not None:
            own = torch.eye(tgt.size(1), dtype=torch.bool, device=tgt.device)
            tgt_mask = tgt_mask & (target_mask[:, None, None, :].bool() | own)
        return self.decode(self.encode(src, src_mask), src_mask, tgt, tgt_mask)


@torch.no_grad()
def greedy(model, source, steps, use_cache=False):
    memory = model.encode(source, None)
    tokens = torch.zeros(source.size(0), 1, dtype=torch.long, device=source.device)
    for _ in range(steps):
        mask = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool, device=source.device).tril()[None, None]
        logits = model.decode(memory, None, tokens, mask)[:, -1]
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens


subject = Subject(
    kind="encoder_decoder",
    name="annotated transformer, memory projected once",
    build=lambda c: EncoderDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    generate=greedy,
    mask_forms=("padding",),
    declares={
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
        "padding_side": "right",
    },
)

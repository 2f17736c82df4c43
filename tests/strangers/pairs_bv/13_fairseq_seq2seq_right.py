import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    """fairseq: heads folded into the batch, [B * H, T, K]."""

    def __init__(self, d, h):
        super().__init__()
        self.h, self.k = h, d // h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))

    def shape(self, x):
        b, t, _ = x.shape
        return x.view(b, t, self.h, self.k).transpose(1, 2).reshape(b * self.h, t, self.k)

    def forward(self, query, key, key_padding_mask=None, causal=False):
        b, t, d = query.shape
        q, k, v = self.shape(self.q_proj(query) * self.k**-0.5), self.shape(self.k_proj(key)), self.shape(self.v_proj(key))
        scores = torch.bmm(q, k.transpose(1, 2))
        low = torch.finfo(scores.dtype).min
        if causal:
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1), low)
        if key_padding_mask is not None:
            scores = scores.masked_fill(key_padding_mask.repeat_interleave(self.h, dim=0)[:, None, :], low)
        out = torch.bmm(scores.softmax(-1), v)
        return self.out_proj(out.view(b, self.h, t, self.k).transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, d, h, ff, cross):
        super().__init__()
        self.self_attn, self.norm1 = MultiheadAttention(d, h), nn.LayerNorm(d)
        if cross:
            self.encoder_attn, self.norm_x = MultiheadAttention(d, h), nn.LayerNorm(d)
        self.fc1, self.fc2, self.norm2 = nn.Linear(d, ff), nn.Linear(ff, d), nn.LayerNorm(d)

    def forward(self, x, pad, memory=None, memory_pad=None):
        x = self.norm1(x + self.self_attn(x, x, pad, causal=memory is not None))
        if memory is not None:
            x = self.norm_x(x + self.encoder_attn(x, memory, memory_pad))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))


class Seq2Seq(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c.d_model
        self.src, self.tgt = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.enc = nn.ModuleList(Block(d, c.num_heads, c.d_ff, False) for _ in range(c.num_layers))
        self.dec = nn.ModuleList(Block(d, c.num_heads, c.d_ff, True) for _ in range(c.num_layers))
        self.out = nn.Linear(d, c.vocab_size)

    def embed(self, table, tokens):
        x = table(tokens) * math.sqrt(table.embedding_dim)
        d = x.size(-1)
        freq = 10000 ** (-torch.arange(0, d, 2, device=x.device, dtype=x.dtype) / d)
        angles = torch.arange(x.size(1), device=x.device, dtype=x.dtype)[:, None] * freq
        return x + torch.cat((angles.sin(), angles.cos()), dim=-1)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_pad = None if source_mask is None else ~source_mask.bool()
        target_pad = None if target_mask is None else ~target_mask.bool()
        memory = self.embed(self.src, source)
        for block in self.enc:
            memory = block(memory, source_pad)
        x = self.embed(self.tgt, target)
        for block in self.dec:
            x = block(x, target_pad, memory, source_pad)
        return self.out(x)


subject = Subject(
    kind="encoder_decoder",
    build=Seq2Seq,
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"causal": True, "positions": "sinusoidal", "layout": "halves", "embedding_scale": True, "norm_placement": "post", "activation": "relu", "final_norm": False, "tied": False, "padding_side": "right"},
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
)

"""fairseq-style translation model; keys and values of the encoder are projected once a layer and call."""
import math

import torch
from torch import nn
import torch.nn.functional as F

from veriformer.properties import Subject


def sinusoid(n, d, like):
    pos = torch.arange(n, device=like.device, dtype=like.dtype)[:, None]
    i = torch.arange((d + 1) // 2, device=like.device, dtype=like.dtype)
    ang = pos * torch.exp(-math.log(10000.0) * 2 * i / d)
    return torch.stack([ang.sin(), ang.cos()], -1).flatten(1)[:, :d]


class MultiheadAttention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))
        self._static = None

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.h, -1).transpose(1, 2)

    def forward(self, query, key, mask, static_kv=False):
        q = self.heads(self.q_proj(query))
        k = v = None
        if static_kv and not self.training and self._static is not None:
            saved_for, k, v = self._static
            if saved_for is not key:
                k = v = None
        if k is None:
            k, v = self.heads(self.k_proj(key)), self.heads(self.v_proj(key))
        self._static = None
        if static_kv and not self.training and not torch.is_grad_enabled():
            self._static = (key, k, v)
        s = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        s = s.masked_fill(~mask, torch.finfo(s.dtype).min)
        y = torch.softmax(s, -1) @ v
        return self.out_proj(y.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.self_attn, self.fc1, self.fc2 = MultiheadAttention(d, h), nn.Linear(d, ff), nn.Linear(ff, d)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class DecoderLayer(EncoderLayer):
    def __init__(self, d, h, ff):
        super().__init__(d, h, ff)
        self.encoder_attn, self.encoder_attn_layer_norm = MultiheadAttention(d, h), nn.LayerNorm(d)

    def forward(self, x, mask, memory, memory_mask):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, memory_mask, static_kv=True))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class TransformerModel(nn.Module):
    def __init__(self, vocab, d, h, n, ff):
        super().__init__()
        self.d = d
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, d), nn.Embedding(vocab, d)
        self.encoder = nn.ModuleList([EncoderLayer(d, h, ff) for _ in range(n)])
        self.decoder = nn.ModuleList([DecoderLayer(d, h, ff) for _ in range(n)])
        self.output_projection = nn.Linear(d, vocab, bias=False)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_mask = torch.ones_like(source, dtype=torch.bool) if source_mask is None else source_mask
        target_mask = torch.ones_like(target, dtype=torch.bool) if target_mask is None else target_mask
        memory_mask = source_mask[:, None, None, :]
        T = target.shape[1]
        self_mask = target_mask[:, None, None, :] & torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        x = self.src_embed(source) * math.sqrt(self.d)
        x = x + sinusoid(source.shape[1], self.d, x)
        for layer in self.encoder:
            x = layer(x, memory_mask)
        y = self.tgt_embed(target) * math.sqrt(self.d)
        y = y + sinusoid(T, self.d, y)
        for layer in self.decoder:
            y = layer(y, self_mask, x, memory_mask)
        return self.output_projection(y)


subject = Subject(
    kind="encoder_decoder",
    name="translation with static keys and values",
    build=lambda c: TransformerModel(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"causal": True, "positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "norm": "layer",
              "norm_placement": "post", "activation": "relu", "output_bias": False, "padding_side": "right"},
)

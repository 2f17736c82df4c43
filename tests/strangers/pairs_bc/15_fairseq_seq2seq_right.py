"""The Transformer of 2017 the way fairseq writes it: heads folded into the batch, bmm, post-LN."""
import math

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def fold(self, t):
        """[B, L, D] -> [B * H, L, D / H]"""
        bsz, length, _ = t.shape
        t = t.view(bsz, length, self.num_heads, self.head_dim).transpose(1, 2)
        return t.reshape(bsz * self.num_heads, length, self.head_dim)

    def forward(self, query, key, key_padding_mask=None, attn_mask=None):
        """key_padding_mask [B, S], attn_mask [T, S]: True = hidden"""
        bsz, tgt_len, embed_dim = query.shape
        q = self.fold(self.q_proj(query) * self.scaling)
        k = self.fold(self.k_proj(key))
        v = self.fold(self.v_proj(key))
        attn_weights = torch.bmm(q, k.transpose(1, 2))
        low = torch.finfo(attn_weights.dtype).min
        if attn_mask is not None:
            attn_weights = attn_weights.masked_fill(attn_mask[None], low)
        if key_padding_mask is not None:
            hidden = key_padding_mask.repeat_interleave(self.num_heads, dim=0)
            attn_weights = attn_weights.masked_fill(hidden[:, None, :], low)
        attn = torch.bmm(F.softmax(attn_weights, dim=-1), v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2)
        return self.out_proj(attn.reshape(bsz, tgt_len, embed_dim))


class TransformerLayer(nn.Module):
    def __init__(self, dim, heads, ffn, decoder):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        if decoder:
            self.encoder_attn = MultiheadAttention(dim, heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn)
        self.fc2 = nn.Linear(ffn, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, padding=None, future=None, memory=None, memory_padding=None):
        x = self.self_attn_layer_norm(x + self.self_attn(x, x, padding, future))
        if memory is not None:
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory, memory_padding))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class TransformerModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.dim = c.d_model
        self.embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        make = lambda decoder: nn.ModuleList(
            [TransformerLayer(c.d_model, c.num_heads, c.d_ff, decoder) for _ in range(c.num_layers)]
        )
        self.encoder, self.decoder = make(False), make(True)
        self.output_projection = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def embed(self, tokens):
        T, D = tokens.shape[1], self.dim
        rate = torch.exp(torch.arange(0, D, 2, dtype=torch.float64) * (-math.log(10000.0) / D))
        angle = torch.arange(T, dtype=torch.float64)[:, None] * rate
        pe = torch.zeros(T, D, dtype=torch.float64)
        pe[:, 0::2], pe[:, 1::2] = angle.sin(), angle.cos()[:, : D // 2]
        x = self.embed_tokens(tokens) * math.sqrt(D)
        return x + pe.to(x)

    def forward(self, src, tgt, src_padding=None, tgt_padding=None):
        memory = self.embed(src)
        for layer in self.encoder:
            memory = layer(memory, src_padding)
        future = torch.ones(tgt.shape[1], tgt.shape[1], dtype=torch.bool).triu(1)
        x = self.embed(tgt)
        for layer in self.decoder:
            x = layer(x, tgt_padding, future, memory, src_padding)
        return self.output_projection(x)


def forward(m, source, target, source_mask=None, target_mask=None):
    hidden = [None if mask is None else ~mask for mask in (source_mask, target_mask)]
    return m(source, target, *hidden)


subject = Subject(
    kind="encoder_decoder",
    name="fairseq-style Transformer",
    build=TransformerModel,
    forward=forward,
    declares={
        "causal": True,
        "positions": "sinusoidal",
        "embedding_scale": True,
        "norm": "layer",
        "norm_placement": "post",
        "final_norm": False,
        "activation": "relu",
        "bias": True,
        "output_bias": False,
        "padding_side": "right",
    },
)
